"""RMS norms: found by what they compute, left alone where they compute something else."""

import pytest
import torch
from torch import nn

from longgraft.check import probe_exact, self_check
from longgraft.kernels import rows_linear
from longgraft.linear import wide
from longgraft.norms import norms
from longgraft.target import Target
from tests.models import ARCHS, tiny_model

native = pytest.mark.skipif(not rows_linear.is_available(), reason="the native kernels are not built")


class Norm(nn.Module):
    def __init__(self, size=24, eps=1e-5, shift=0.0, inner=False, outside=False, power=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.small, self.shift, self.inner, self.outside, self.power = eps, int(shift), inner, outside, str(power)

    def forward(self, x):
        wide = x.float()
        mean = wide.square().mean(-1, keepdim=True)
        wide = wide / (mean.pow(float(self.power)) + self.small if self.outside else (mean + self.small).sqrt())
        if self.inner:
            return self.weight * wide.to(x.dtype)
        return ((self.shift + self.weight.float()) * wide).to(x.dtype)


@pytest.fixture(autouse=True)
def quiet():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def found(module, dtype=torch.bfloat16):
    return [part for part, _ in norms(module.to(dtype).eval())]


@native
@pytest.mark.parametrize("dtype", list(rows_linear.DTYPES))
@pytest.mark.parametrize("options", [{}, {"inner": True}, {"shift": 1}, {"eps": 1e-3}])
def test_norms_are_found_and_agree(options, dtype):
    module = Norm(**options).to(dtype)
    module.weight.copy_(torch.randn(24))
    x = torch.randn(1, 9, 24).to(dtype)
    own = module(x)
    assert found(module, dtype) == [module]
    with wide(module) as context:
        assert context.between == [module]
        ours = module(x)
        assert torch.equal(module(x[:, 3:4]), ours[:, 3:4])
    assert torch.allclose(ours, own, rtol=8 * torch.finfo(dtype).eps)
    assert torch.equal(module(x), own) and "forward" not in module.__dict__


@native
@pytest.mark.parametrize("dtype", list(rows_linear.DTYPES))
@pytest.mark.parametrize("make", [
    lambda: nn.LayerNorm(24, bias=False),
    lambda: Norm(outside=True, eps=1e-3),
    lambda: Norm(outside=True, power=0.25),
    lambda: nn.Bilinear(24, 24, 24),
], ids=["layer norm", "eps outside", "root", "two"])  # fmt: skip
def test_what_computes_something_else_is_left_alone(make, dtype):
    assert found(make(), dtype) == []


@native
def test_each_kind_is_tried_once_and_settings_make_kinds(monkeypatch):
    calls = []
    own = Norm.forward
    monkeypatch.setattr(Norm, "forward", lambda self, x: calls.append(self.small) or own(self, x))
    model = nn.ModuleList([Norm(), Norm(), Norm(eps=1e-3, outside=True), Norm()])
    assert found(model) == [model[0], model[1], model[3]]
    assert calls == [1e-5, 1e-3]


@native
def test_hooks_and_own_forwards_keep_modules_as_they_are():
    model = nn.ModuleList([Norm(), Norm(), Norm()]).bfloat16().eval()
    model[0].register_forward_hook(lambda *args: None)
    model[1].forward = own = lambda x: x
    with wide(model, always=True):
        assert {i for i, part in enumerate(model) if "forward" in part.__dict__} == {1, 2}
        assert model[1].forward is own


@native
def test_hooks_that_come_between_finding_and_entering_count():
    model = nn.ModuleList([Norm(), Norm()]).bfloat16().eval()
    context = wide(model)
    model[0].register_forward_hook(lambda *args: None)
    with context:
        assert "forward" not in model[0].__dict__ and "forward" in model[1].__dict__


@native
def test_other_dtypes_and_gradients_go_to_the_module_itself():
    model = nn.ModuleList([Norm()]).eval()
    x = torch.randn(2, 3, 24)
    with wide(model, always=True), torch.enable_grad():
        assert model[0](x.double()).dtype == torch.float64
        model[0](x).sum().backward()
        assert model[0].weight.grad is not None
    model.double()
    assert found(model, torch.float64) == []


@native
def test_contexts_nest_and_overlap():
    model = nn.ModuleList([Norm(), Norm(shift=1)]).bfloat16().eval()
    one, two = wide(model), wide(model)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert all("forward" in part.__dict__ for part in model)
    assert wide(model).between == list(model), "a context made inside another"
    two.__exit__(None, None, None)
    assert not any("forward" in part.__dict__ for part in model)
    with pytest.raises(KeyError), one:
        raise KeyError
    assert not any("forward" in part.__dict__ for part in model)


@native
def test_finding_leaves_no_trace():
    model = nn.ModuleList([Norm(), Norm(shift=1)]).bfloat16().eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    norms(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@native
@pytest.mark.parametrize("arch", ARCHS)
def test_models_keep_their_logits_and_have_their_norms_found(arch):
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(arch, dtype)
        target = Target(model)
        self_check(target)
        norms = [part for part in model.modules() if type(part).__name__.endswith("RMSNorm")]
        assert {id(part) for part in norms} <= {id(part) for part in target.linear.between}
    assert Target(tiny_model(arch)).linear.between == []


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "phi3_longrope"])
def test_a_token_has_the_same_bits_alone_and_in_a_tree(arch, dtype):
    target = Target(tiny_model(arch, dtype), exact=True)
    assert target.linear.between
    probe_exact(target)


def test_without_a_native_module_nothing_is_found(monkeypatch):
    monkeypatch.setattr(rows_linear, "KERNEL", None)
    assert found(nn.ModuleList([Norm(), Norm(shift=1)])) == []
