"""`hpsearch::einsum` is torch.einsum on the forms that capture writes, in every dtype and for any strides."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hpsearch.capture.ops import contraction
from hpsearch.errors import InternalError

SIZES = {"b": 2, "s": 3, "t": 4, "d": 5, "f": 6}
FORMS = ["bsd,fd->bsf", "bsd,df->bsf", "bsf,bsd->fd", "bd,df->bf", "bf,bd->fd", "bstd,fd->bstf", "bstf,bstd->fd"]


@pytest.mark.parametrize("equation", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_dense", [True, False])
def test_equals_torch(equation: str, dtype: torch.dtype, is_dense: bool) -> None:
    torch.manual_seed(0)
    operands = []
    for letters in equation.partition("->")[0].split(","):
        shape = [SIZES[c] for c in letters]
        x = torch.randn(shape, dtype=dtype)
        operands.append(x if is_dense else torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))))
    found = torch.ops.hpsearch.einsum(equation, *operands)
    expected = torch.einsum(equation, *(x.double() for x in operands))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert found.is_contiguous()
    assert found.dtype == dtype
    with FakeTensorMode() as mode:
        fake = torch.ops.hpsearch.einsum(equation, *(mode.from_tensor(x) for x in operands))
    assert (fake.shape, fake.stride(), fake.dtype) == (found.shape, found.stride(), found.dtype)


def test_what_is_not_one_matrix_product_is_refused() -> None:
    for equation in ("bsd,bfd->bsf", "sbd,fbd->sf" + "d", "bd,fd->fb", "b,f->bf", "dbs,fd->bsf" + "x"):
        with pytest.raises(InternalError, match="einsum"):
            contraction(equation)
