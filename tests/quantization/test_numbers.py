from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from specpipe.quantization import numbers

INF = float("inf")


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_rows(num_rows: int, num_columns: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_columns, generator=generator)


def test_e4m3_rounds_to_even_and_clamps() -> None:
    values = torch.tensor([1.0, 1.0625, 1.1875, 2.0**-10, 2.0**-9, 460.0, -500.0, INF, 17.0])
    assert numbers.to_e4m3(values).float().tolist() == [
        1.0,
        1.0,  # half-way from 1 to 1.125
        1.25,  # half-way from 1.125 to 1.25
        0.0,  # half-way to the least number
        2.0**-9,
        448.0,
        -448.0,
        448.0,
        16.0,  # half-way from 16 to 18
    ]


def test_integers_round_to_even_and_clamp() -> None:
    values = torch.tensor([0.5, 1.5, -2.5, 7.5, -8.5, -9.0, 126.5, 127.6, -128.6])
    assert numbers.to_int(values, 4).tolist() == [0, 2, -2, 7, -8, -8, 7, 7, -8]
    assert numbers.to_int(values, 8).tolist() == [0, 2, -2, 8, -8, -9, 126, 127, -128]


def test_every_half_way_point_of_e2m1_goes_to_the_even_mantissa() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    nearest = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert numbers.from_e2m1(numbers.to_e2m1(halves)).tolist() == nearest
    assert numbers.from_e2m1(numbers.to_e2m1(-halves)).tolist() == [-value for value in nearest]


def test_e2m1_rounds_to_the_nearest_and_clamps() -> None:
    values = torch.tensor([0.26, 0.74, 0.76, 1.24, 2.49, 2.51, 3.49, 3.51, 4.99, 5.01, 9.0, -INF])
    nearest = [0.5, 0.5, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0, -6.0]
    assert numbers.from_e2m1(numbers.to_e2m1(values)).tolist() == nearest
    assert numbers.to_e2m1(torch.tensor([0.0, 0.5, 6.0, -0.5, -6.0])).tolist() == [0, 1, 7, 9, 15]


def test_pairs_of_rows_share_a_byte_the_first_in_the_low_half() -> None:
    numbers_ = torch.tensor([[1, -8], [2, 7], [-1, 0], [-2, 5]], dtype=torch.int8)
    packed = numbers.pack_rows(numbers_)
    assert packed.view(torch.uint8).tolist() == [[0x21, 0x78], [0xEF, 0x50]]
    assert numbers.unpack_rows(packed).tolist() == numbers_.tolist()


def test_pairs_of_columns_share_a_byte_the_first_in_the_low_half() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = numbers.pack_columns(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert numbers.unpack_columns(packed).tolist() == codes.tolist()


def test_every_packed_byte_unpacks_and_packs_to_itself() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    again = numbers.pack_rows(numbers.unpack_rows(packed))
    assert torch.equal(again.view(torch.uint8), packed)
    assert torch.equal(numbers.pack_columns(numbers.unpack_columns(packed)), packed)


def test_a_scale_of_nothing_but_zeros_is_one() -> None:
    weight = rows([0.0] * 16, [0.5] + [0.0] * 15)
    assert numbers.row_scales(weight, 127.0).tolist() == pytest.approx([1.0, 0.5 / 127])
    assert numbers.block_scales(weight, 16, torch.float32)[0].item() == 1.0
    # 6e-9 / 7 is 0 in float16: the weights become 0, not infinite
    assert numbers.block_scales(weight * 1.2e-8, 16, torch.float16)[1].item() == 1.0
    scale_2 = torch.tensor([0.5 / (6 * 448)])
    assert numbers.nvfp4_block_scales(weight, scale_2).float().tolist() == [[1.0], [448.0]]


def test_fp8_by_hand() -> None:
    weight = rows([4.48, -2.0, 0.013], [0.0, 1.0, 1.07])
    scale = torch.tensor([0.01])
    quantized = numbers.quantize_fp8(weight, scale)
    assert quantized.float().tolist() == [[448.0, -192.0, 1.25], [0.0, 96.0, 104.0]]
    dequantized = numbers.dequantize_rows(quantized, scale)
    assert dequantized.flatten().tolist() == pytest.approx([4.48, -1.92, 0.0125, 0, 0.96, 1.04])


def test_int4_by_hand() -> None:
    weight = rows([7.0, -3.4, 0.6, 1.0], [-0.7, 0.35, 14.0, -15.0])
    scales = numbers.block_scales(weight, 2, torch.float32)
    assert scales.flatten().tolist() == pytest.approx([1.0, 1 / 7, 0.1, 15 / 7])
    packed = numbers.quantize_int4(weight, scales)
    assert numbers.unpack_rows(packed).tolist() == [[7, -3, 4, 7], [-7, 4, 7, -7]]
    assert numbers.dequantize_int4(packed, scales)[0].tolist() == pytest.approx(
        [7.0, -3.0, 4 / 7, 1.0]
    )


def test_the_stored_scale_divides() -> None:
    """7 · bfloat16(x / 7) is above x or below it; the numbers are those of what is stored."""
    weight = rows([1.01, 0.5, 0.2, -0.8], [1.0, 0.0, 0.0, 0.0])
    scales = numbers.block_scales(weight, 4, torch.bfloat16)
    assert scales.dtype == torch.bfloat16
    packed = numbers.quantize_int4(weight, scales)
    stored = scales.float()[0, 0].item()
    assert stored != pytest.approx(1.01 / 7, rel=1e-4)
    expected = np.rint(np.array([1.01, 0.5, 0.2, -0.8]) / stored)
    assert numbers.unpack_rows(packed)[0].tolist() == expected.tolist()


def test_nvfp4_by_hand() -> None:
    weight = rows([6.0, 3.0, -0.5, 0.2] + [0.0] * 12)
    scale_2 = torch.tensor([6.0 / (6 * 448)])
    scales = numbers.nvfp4_block_scales(weight, scale_2)
    assert scales.float().tolist() == [[448.0]]
    packed = numbers.quantize_nvfp4(weight, scales, scale_2)
    assert packed[0, :2].tolist() == [0x57, 0x09]  # 6 and 3, -½ and 0
    dequantized = numbers.dequantize_nvfp4(packed, scales, scale_2)
    assert dequantized[0, :4].tolist() == pytest.approx([6.0, 3.0, -0.5, 0.0])


def test_int8_weight_only_is_tensorrt_llms() -> None:
    """128, not 127; the positive greatest is clamped, and ties go away from 0."""
    weight = rows([1.28, -0.015, 0.004, 0.015], [-1.28, 0.6, 0.0, 0.0])
    made = numbers.weight_only(weight, 8, torch.float32)
    assert made.flatten().tolist() == pytest.approx([1.27, -0.02, 0.0, 0.02, -1.28, 0.6, 0, 0])


def test_int4_weight_only_rounds_its_scale_last() -> None:
    weight = rows([-1.01, 0.95, 0.3])
    made = numbers.weight_only(weight, 4, torch.bfloat16)
    stored = torch.tensor(1.01 / 8).bfloat16().item()
    assert made.flatten().tolist() == pytest.approx([-8 * stored, 7 * stored, 2 * stored])


def test_dequantized_w4a8_is_what_fp8_holds() -> None:
    weight = rows([7.0, 3.0], [1.0, -1.0])
    scales = torch.tensor([[1.0], [1 / 7]])
    tensors = {
        "quantized": numbers.quantize_int4(weight, scales),
        "weights_scaling_factor": scales,
        "weights_scaling_factor_2": torch.tensor([7.0 / 448]),
    }
    made = numbers.dequantize("w4a8_awq", tensors)  # type: ignore[arg-type]
    assert made.flatten().tolist() == [7.0, 3.0, 1.0, -1.0]
    tensors["weights_scaling_factor_2"] = torch.tensor([1.0])
    scales[:] = torch.tensor([[1.06], [0.3]])
    made = numbers.dequantize("w4a8_awq", tensors)  # type: ignore[arg-type]
    # 7.42, 3.18, 2.1, -2.1 in e4m3
    assert made.flatten().tolist() == [7.5, 3.25, 2.0, -2.0]


def test_zero_points_are_added() -> None:
    tensors = {
        "quantized": numbers.pack_rows(torch.tensor([[7, -8], [0, 1]], dtype=torch.int8)),
        "weights_scaling_factor": torch.tensor([[0.5], [2.0]]),
        "zero": torch.tensor([[1.5], [-4.0]]),
    }
    made = numbers.dequantize("int4_gptq", tensors)  # type: ignore[arg-type]
    assert made.tolist() == [[5.0, -2.5], [-4.0, -2.0]]


def test_numbers_are_modelopts_own() -> None:
    """Bit for bit in float32, where ModelOpt does not round quotients to the weight's dtype."""
    pytest.importorskip("modelopt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.export import quant_utils
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
    weight = random_rows(64, 256)
    weight[0, :16] = 0
    weight[1] = torch.arange(256) % 13 / 4 - 1.5  # many half-way points

    scales = numbers.block_scales(weight, 64, torch.float32)
    assert torch.equal(scales, quant_utils.get_scaling_factor_from_weight(weight, 64))
    theirs = quant_utils.pack_int4_in_uint8(weight, scales, 64)
    assert torch.equal(numbers.quantize_int4(weight, scales).view(torch.uint8), theirs)

    scales = numbers.row_scales(weight, 127.0)
    assert torch.equal(scales, quant_utils.get_scaling_factor_from_weight(weight, 0))
    theirs = quant_utils.to_quantized_weight(weight, scales, "int8_sq")
    assert torch.equal(numbers.quantize_int8(weight, scales), theirs)

    for name, scale in (("fp8", weight.abs().max() / 448), ("fp8_pc_pt", scales * 127 / 448)):
        theirs = quant_utils.to_quantized_weight(weight, scale, name).view(torch.uint8)
        ours = numbers.quantize_fp8(weight, scale.reshape(-1)).view(torch.uint8)
        assert torch.equal(ours, theirs)

    scale_2 = weight.abs().max().reshape(1) / (6 * 448)
    ours = numbers.nvfp4_block_scales(weight, scale_2)
    made, scales, _ = NVFP4QTensor.quantize(weight.clone(), 16, None, scale_2)
    assert torch.equal(ours.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(numbers.quantize_nvfp4(weight, ours, scale_2), made._quantized_data)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_survive_a_second_rounding(bits: int) -> None:
    weight = random_rows(8, 32, seed=1)
    if bits == 4:
        scales = numbers.block_scales(weight, 16, torch.bfloat16)
        once = numbers.dequantize_int4(numbers.quantize_int4(weight, scales), scales)
        twice = numbers.dequantize_int4(numbers.quantize_int4(once, scales), scales)
    else:
        scales = numbers.row_scales(weight, 127.0)
        once = numbers.dequantize_rows(numbers.quantize_int8(weight, scales), scales)
        twice = numbers.dequantize_rows(numbers.quantize_int8(once, scales), scales)
    assert torch.equal(once, twice)
