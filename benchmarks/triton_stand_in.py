"""A built pair behind the streaming call of Triton's gRPC protocol, without Triton.

    python benchmarks/triton_stand_in.py engines/python-code/model_repo 9001

For machines that have no Triton: requests and responses go through the ensemble's own code, but in
one process, which Triton's three are not, and no other call is answered.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from specpipe.errors import RequestError, ServerError
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.request import Chunk
from specpipe.text.tools.message_format import MessageFormat
from specpipe.triton import repository, serving
from specpipe.triton.loop import PairLoop
from specpipe.triton.serving.tensors import TENSORS_BY_NAME

_DTYPES = {"BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT64": "<u8", "FP32": "<f4"}


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The models of a repository, in this process."""

    def __init__(self, built: Path) -> None:
        self._tokenizer = repository.load_tokenizer(built)
        self._limits = repository.load_limits(built)
        self._calls = MessageFormat.of(self._tokenizer)
        pair = read_pair(built)
        folder = built / SPECULATIVE / VERSION
        self._loop = PairLoop(
            load_runtime(pair.runtime).load_pair(
                folder / "draft", folder / "target", pair.options, self._tokenizer.detokenizer
            )
        )

    def ModelStreamInfer(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        for message in messages:
            try:
                for arrays, is_last in self._answer(_tensors(message), context):
                    yield _response(message.id, arrays, is_last=is_last)
            except (RequestError, ServerError) as exc:
                yield service_pb2.ModelStreamInferResponse(error_message=str(exc))

    def _answer(
        self, tensors: dict[str, Any], context: Any
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        parsed = serving.parse_request(
            tensors, self._tokenizer, limits=self._limits, calls=self._calls
        )
        request = dataclasses.replace(parsed.request, request_id=uuid.uuid4().hex)
        answer = serving.Answer(dataclasses.replace(parsed, request=request), request.request_id)
        arrived: queue.SimpleQueue[Chunk | RequestError] = queue.SimpleQueue()
        self._loop.submit(request, on_chunk=arrived.put, on_refusal=arrived.put)
        context.add_callback(lambda: self._loop.cancel(request.request_id))
        is_last = False
        while not is_last:
            chunk = arrived.get()
            if isinstance(chunk, RequestError):
                raise chunk
            is_last = chunk.finish_reason is not None
            arrays = answer.add(chunk)
            if arrays is not None:
                arrays["text_output"] = arrays.pop("text")
                yield arrays, is_last


def _tensors(message: Any) -> dict[str, Any]:
    tensors = {}
    for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            texts, start = [], 0
            while start < len(content):
                end = start + 4 + int.from_bytes(content[start : start + 4], "little")
                texts.append(content[start + 4 : end])
                start = end
            array = np.array(texts, dtype=object)
        else:
            array = np.frombuffer(content, _DTYPES[tensor.datatype])
        tensors[tensor.name] = array.reshape(tuple(tensor.shape))
    return tensors


def _response(request_id: str, arrays: dict[str, Any], *, is_last: bool) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = "ensemble", request_id
    response.parameters["triton_final_response"].bool_param = is_last
    for name, array in arrays.items():
        tensor = TENSORS_BY_NAME[name]
        is_text = tensor.dtype == "STRING"
        datatype = "BYTES" if is_text else tensor.dtype
        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        content = array.tobytes()
        if is_text:
            texts = [str(text).encode() for text in array.reshape(-1)]
            content = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        response.raw_output_contents.append(content)
    return message


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("built", type=Path, help="a model repository")
    parser.add_argument("port", type=int, help="of gRPC")
    arguments = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(max_workers=64))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(StandIn(arguments.built), server)
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
