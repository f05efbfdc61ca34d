"""A store in a folder, which several machines may have mounted."""

from __future__ import annotations

import os
from typing import Any

from specpipe.stores.objects import Tree


class Folder(Tree):
    """Files of this machine, or of a file system that has hard links and renames in one step."""

    def rename_new(self, staged: str, path: str) -> bool:
        try:
            os.link(staged, path)  # link(2) fails where the name exists, whoever made it
        except FileExistsError:
            return False
        return True

    def settle(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())
