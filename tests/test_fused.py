"""What lies between linear layers: found by what it computes, left alone where it computes something else."""

import pytest
import torch
from torch import nn

from longgraft.check import probe_exact, self_check
from longgraft.fused import fused
from longgraft.kernels import rows_linear
from longgraft.linear import Wide
from longgraft.linear import wide as default_wide
from longgraft.quantize import quantize
from longgraft.target import Target
from tests.models import ARCHS, tiny_model

native = pytest.mark.skipif(not rows_linear.is_available(), reason="the native kernels are not built")


def wide(model: nn.Module, always: bool = False) -> Wide:
    return default_wide(model, always, gates=True)


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


class Mlp(nn.Module):
    def __init__(self, act, swap=False, limit=None, extra=0.0):
        super().__init__()
        names = ("up", "gate") if swap else ("gate", "up")
        for name in names:
            setattr(self, name, nn.Linear(24, 40, bias=False))
        self.act, self.down, self.limit, self.extra = act, nn.Linear(40, 24), limit, extra

    def forward(self, x):
        gate = self.gate(x)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
        return self.down(self.act(gate) * (self.up(x) + self.extra))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.last, self.first = nn.SiLU(), nn.Linear(40, 24), nn.Linear(24, 80)

    def forward(self, x):
        gate, up = self.first(x).chunk(2, dim=-1)
        return self.last(up * self.act(gate))


@pytest.fixture(autouse=True)
def quiet():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def found(module, dtype=torch.bfloat16):
    return [part for part, _ in fused(module.to(dtype).eval(), gates=True)]


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
    lambda: Mlp(nn.ReLU()),
    lambda: Mlp(nn.GELU()),
    lambda: Mlp(nn.SiLU(), limit=7.0),
    lambda: Mlp(nn.SiLU(), extra=1.0),
    lambda: nn.Bilinear(24, 24, 24),
    lambda: nn.Sequential(nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 24), nn.Linear(24, 24)),
], ids=["layer norm", "eps outside", "root", "relu", "gelu", "clamped", "shifted", "two", "chain"])  # fmt: skip
def test_what_computes_something_else_is_left_alone(make, dtype):
    assert found(make(), dtype) == []


@native
@pytest.mark.parametrize("dtype", list(rows_linear.DTYPES))
@pytest.mark.parametrize("make", [
    lambda: Mlp(nn.SiLU()),
    lambda: Mlp(nn.GELU(approximate="tanh"), swap=True),
    Halves,
])  # fmt: skip
def test_gated_mlps_are_found_and_agree(make, dtype):
    module = make().to(dtype).eval()
    x = torch.randn(1, 9, 24).to(dtype)
    own = module(x)
    assert found(module, dtype) == [module]
    with wide(module, always=True):
        ours = module(x)
        assert torch.equal(module(x[:, 3:4]), ours[:, 3:4])
    assert torch.allclose(ours, own, rtol=0.02, atol=0.02)
    assert torch.equal(module(x), own)


@native
def test_each_kind_is_tried_once_and_settings_make_kinds(monkeypatch):
    calls = []
    own = Mlp.forward
    monkeypatch.setattr(Mlp, "forward", lambda self, x: calls.append(self) or own(self, x))
    act = nn.SiLU()
    model = nn.ModuleList([Mlp(act), Mlp(act), Mlp(act, limit=3.0), Mlp(act)])
    assert found(model) == [model[0], model[1], model[3]]
    assert calls == [model[0], model[2]]


@native
def test_hooks_and_own_forwards_keep_modules_as_they_are():
    model = nn.ModuleList([Norm(), Norm(), Mlp(nn.SiLU()), Mlp(nn.SiLU())]).bfloat16().eval()
    model[0].register_forward_hook(lambda *args: None)
    model[1].forward = own = lambda x: x
    model[2].act.register_forward_pre_hook(lambda *args: None)
    with wide(model, always=True):
        assert {i for i, part in enumerate(model) if "forward" in part.__dict__} == {1, 3}
        assert model[1].forward is own
        seen = []
        model[3].act.register_forward_hook(lambda *args: seen.append(1))
        model[3](torch.randn(1, 2, 24).bfloat16())
        assert seen == [1]


@native
def test_hooks_that_come_between_finding_and_entering_count():
    model = nn.ModuleList([Norm(), Norm()]).bfloat16().eval()
    context = wide(model)
    model[0].register_forward_hook(lambda *args: None)
    with context:
        assert "forward" not in model[0].__dict__ and "forward" in model[1].__dict__


@native
def test_other_dtypes_gradients_and_training_go_to_the_module_itself():
    model = nn.ModuleList([Norm(), Mlp(nn.SiLU())]).eval()
    x = torch.randn(2, 3, 24)
    own = [part(x) for part in model]
    with wide(model, always=True), torch.enable_grad():
        assert model[0](x.double()).dtype == torch.float64
        for part in model:
            part.zero_grad()
            part(x).sum().backward()
            assert all(p.grad is not None for p in part.parameters())
        model.train()
        assert torch.allclose(model[1](x), own[1], atol=1e-5)
    model.double()
    assert found(model, torch.float64) == []


@native
def test_contexts_nest_and_overlap():
    model = nn.ModuleList([Norm(), Mlp(nn.SiLU())]).bfloat16().eval()
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
def test_adapters_are_asked():
    peft = pytest.importorskip("peft")
    base = nn.ModuleDict({"mlp": Mlp(nn.SiLU())}).eval()
    config = peft.LoraConfig(r=4, target_modules=["gate", "down"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    x = torch.randn(1, 5, 24)
    mlp = base["mlp"]
    plain = mlp(x)
    with wide(adapted, always=True) as context:
        assert context.between == [mlp]
        assert torch.allclose(mlp(x), plain, atol=1e-5)


@native
def test_finding_leaves_no_trace():
    model = nn.ModuleList([Norm(), Mlp(nn.SiLU())]).bfloat16().eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    fused(model, gates=True)
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
def test_8_bit_layers_stand_in_a_gated_mlp():
    model = tiny_model("qwen2", torch.bfloat16)
    quantize(model)
    assert sum(type(part).__name__ == "Qwen2MLP" for part in wide(model).between) == 2
    target = Target(model)
    target.linear = wide(model)
    self_check(target)


@native
def test_gates_are_asked_for():
    model = nn.ModuleList([Norm(), Mlp(nn.SiLU())]).bfloat16().eval()
    assert default_wide(model).between == [model[0]]


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "phi3_longrope"])
def test_a_token_has_the_same_bits_alone_and_in_a_tree(arch, dtype):
    target = Target(tiny_model(arch, dtype), exact=True)
    assert target.linear.between
    probe_exact(target)


def test_without_a_native_module_nothing_is_found(monkeypatch):
    monkeypatch.setattr(rows_linear, "KERNEL", None)
    assert found(nn.ModuleList([Norm(), Mlp(nn.SiLU())])) == []
