#!/usr/bin/env bash
# OpenAI's API with curl: the model's name, a completion, one as events, a chat held to a schema.
#   examples/openai_curl.sh [http://127.0.0.1:8080]
set -euo pipefail
url=${1:-http://127.0.0.1:8080}
ask() { curl --silent --show-error --fail --header 'content-type: application/json' "$@"; }

model=$(ask "$url/v1/models" | sed 's/.*"data":\[{"id":"\([^"]*\)".*/\1/')
echo "$model"

ask "$url/v1/completions" \
    --data '{"model": "'"$model"'", "prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0}'
echo

ask --no-buffer "$url/v1/completions" \
    --data '{"model": "'"$model"'", "prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0, "stream": true}'

ask "$url/v1/chat/completions" --data @- <<END
{
    "model": "$model",
    "messages": [{"role": "user", "content": "Is 7 prime?"}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "verdict",
            "schema": {
                "type": "object",
                "properties": {"is_prime": {"type": "boolean"}},
                "required": ["is_prime"],
                "additionalProperties": false
            }
        }
    },
    "max_tokens": 32
}
END
echo
