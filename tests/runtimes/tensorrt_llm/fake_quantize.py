"""A stand-in for examples/quantization/quantize.py of TensorRT-LLM (c8c6df08), without a GPU.

It converts the checkpoint as specpipe does and changes its config.json as ModelOpt's export would;
the weights stay plain. FAKE_EDIT is Python that changes `config` before it is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ALGOS = {
    "fp8": "FP8",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "nvfp4": "NVFP4",
}


def main(argv: list[str]) -> None:
    from specpipe.stages.convert import convert

    parser = argparse.ArgumentParser("quantize.py", allow_abbrev=False)
    add = parser.add_argument
    add("--model_dir", type=Path, required=True)
    add("--output_dir", type=Path, default=Path("exported_model"))
    add("--qformat", choices=[*ALGOS, "full_prec"], default="full_prec")
    add("--kv_cache_dtype", choices=["int8", "fp8"])
    add("--dtype", choices=["auto", "float16", "bfloat16", "float32"], default="auto")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--device_map", choices=["auto", "sequential", "cpu", "gpu"], default="auto")
    add("--calib_dataset", default="cnn_dailymail")
    add("--quantize_lm_head", action="store_true")
    numbers = {"calib_size": 512, "calib_max_seq_length": 512, "tokenizer_max_seq_length": 2048}
    numbers |= {"batch_size": 1, "awq_block_size": 128, "tp_size": 1, "pp_size": 1, "cp_size": 1}
    for name, default in {**numbers, "seed": 1234}.items():
        add(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    if args.calib_dataset.startswith("/") and not Path(args.calib_dataset).is_dir():
        print("DatasetNotFoundError: Couldn't find any data file")
        sys.exit(1)
    assert (args.model_dir / "tokenizer.json").is_file(), "calibration needs the tokenizer"
    convert(args.model_dir, args.output_dir, tp_size=args.tp_size, pp_size=args.pp_size)
    path = args.output_dir / "config.json"
    config = json.loads(path.read_bytes())
    kv_algo = args.kv_cache_dtype and args.kv_cache_dtype.upper()
    if args.qformat == "int4_awq":
        kv_algo = "FP8"
    if "awq" in args.qformat:
        config["vocab_size"] = -(-config["vocab_size"] // 64) * 64
    config["logits_dtype"] = "float16" if config["dtype"] == "bfloat16" else config["dtype"]
    config["producer"] = {"name": "modelopt", "version": "0.37.0"}
    config["quantization"] = {"quant_algo": ALGOS[args.qformat], "kv_cache_quant_algo": kv_algo}
    exec(os.environ.get("FAKE_EDIT", ""), {"config": config, "out": args.output_dir})
    path.write_text(json.dumps(config))
    print("Quantization done. Total time used 1.00 s.")


if __name__ == "__main__":
    main(sys.argv[1:])
