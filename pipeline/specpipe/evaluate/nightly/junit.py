"""What came of nightly runs as JUnit's XML, which GitLab and others show: a test case a pair."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from specpipe.evaluate.nightly.run import Finished
from specpipe.evaluate.nightly.summary import what_changed

_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0, section 2.2, has no place for."""


def write_junit(runs: Sequence[Finished]) -> bytes:
    """Returns the report: a failure is a threshold, an error a step that could not be done."""
    suite = ElementTree.Element("testsuite", name="specpipe nightly", tests=str(len(runs)))
    for kind, outcome in (("failures", "bad"), ("errors", "unfinished")):
        suite.set(kind, str(sum(finished.run.outcome == outcome for finished in runs)))
    for run in (finished.run for finished in runs):
        case = ElementTree.SubElement(suite, "testcase", classname="nightly", name=_text(run.pair))
        lines = [*run.reasons, *([what_changed(run)] if run.changes else []), *run.notes]
        if run.outcome != "good":
            tag = "failure" if run.outcome == "bad" else "error"
            found = ElementTree.SubElement(case, tag, message=_text(run.reasons[0]))
            found.text = _text("\n".join(lines))
        else:
            ElementTree.SubElement(case, "system-out").text = _text("\n".join(lines))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _text(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
