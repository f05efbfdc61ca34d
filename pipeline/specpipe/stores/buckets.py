"""The stores in buckets, S3 and GCS; their libraries find credentials where they always do.

S3: the environment and files of AWS (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, …), as
botocore reads them. GCS: Application Default Credentials (GOOGLE_APPLICATION_CREDENTIALS, …).
"""

from __future__ import annotations

from specpipe.stores.objects import Buckets
from specpipe.stores.patience import ANSWER_S, CONNECT_S


def s3(bucket: str, path: str) -> Buckets:
    """Returns the contents below a path of an S3 bucket."""
    from s3fs import S3FileSystem

    fs = S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,  # others write, too
        config_kwargs={
            "connect_timeout": CONNECT_S,
            "read_timeout": ANSWER_S,
            "retries": {"mode": "standard", "max_attempts": 1},
        },
    )
    # Of one request, such as a part of a large content; Patience begins the whole of it anew.
    fs.retries = 3
    return Buckets(fs, f"{bucket}/{path}")


def gcs(bucket: str, path: str) -> Buckets:
    """Returns the contents below a path of a GCS bucket."""
    from gcsfs import GCSFileSystem

    fs = GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
    return Buckets(fs, f"{bucket}/{path}")
