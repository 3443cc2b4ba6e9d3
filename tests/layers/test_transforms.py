"""What a transform folds into a matrix and a bias is what it does to inputs and outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlm.layers.patch import InputTransform, OutputTransform
from graftlm.layers.transforms import Affine, BlockRotation, InputScale, PairRotation, Successive

ROWS, INPUTS, OUTPUTS = 5, 12, 8


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ORDER = torch.tensor([3, 0, 11, 7, 1, 5, 2, 9, 10, 4, 6, 8])
INPUT_TRANSFORMS: dict[str, InputTransform] = {
    "scale": InputScale(factors=draw(INPUTS)),
    "rotation": BlockRotation(blocks=draw(3, 4, 4)),
    "shared_rotation": BlockRotation(blocks=draw(1, 4, 4)),
    "ordered_rotation": BlockRotation(blocks=draw(3, 4, 4), order=ORDER),
    "successive": Successive(
        transforms=(BlockRotation(blocks=draw(3, 4, 4), order=ORDER), BlockRotation(blocks=draw(6, 2, 2)))
    ),
}
OUTPUT_TRANSFORMS: dict[str, OutputTransform] = {
    "scale": Affine(scale=draw(OUTPUTS)),
    "shift": Affine(shift=draw(OUTPUTS)),
    "scale_and_shift": Affine(scale=draw(OUTPUTS), shift=draw(OUTPUTS)),
    "pairs": PairRotation(straight=draw(OUTPUTS), crossed=draw(OUTPUTS), group_size=4),
}


@pytest.mark.parametrize("transform", INPUT_TRANSFORMS.values(), ids=INPUT_TRANSFORMS)
def test_an_input_transform_folds_into_the_matrix(transform: InputTransform) -> None:
    x, weight = draw(ROWS, INPUTS), draw(OUTPUTS, INPUTS)
    kept = weight.clone()
    expected = transform(x) @ weight.t()
    assert (expected - x @ weight.t()).abs().max() > 0.1
    torch.testing.assert_close(x @ transform.fold(weight).t(), expected)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("bias", [None, draw(OUTPUTS, 1)[:, 0]], ids=["no_bias", "bias"])
@pytest.mark.parametrize("transform", OUTPUT_TRANSFORMS.values(), ids=OUTPUT_TRANSFORMS)
def test_an_output_transform_folds_into_matrix_and_bias(transform: OutputTransform, bias: Tensor | None) -> None:
    x, weight = draw(ROWS, INPUTS), draw(OUTPUTS, INPUTS)
    kept = weight.clone()
    plain = torch.nn.functional.linear(x, weight, bias)
    expected = plain.clone()
    transform.apply(expected)
    assert (expected - plain).abs().max() > 0.1
    folded = torch.nn.functional.linear(x, transform.fold_weight(weight), transform.fold_bias(bias))
    torch.testing.assert_close(folded, expected)
    assert torch.equal(weight, kept)
