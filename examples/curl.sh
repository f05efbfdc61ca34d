#!/usr/bin/env bash
# Triton's generate extension with curl: a whole answer as JSON, then one as server-sent events.
#   examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

curl --silent --show-error --fail "$url/v2/models/ensemble/generate" \
    --data '{"text_input": "def fibonacci(n):", "max_tokens": 32, "num_draft_tokens": 4}'
echo

curl --silent --show-error --fail --no-buffer "$url/v2/models/ensemble/generate_stream" \
    --data '{"text_input": "def fibonacci(n):", "max_tokens": 32, "stream": true}'
