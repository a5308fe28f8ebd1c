"""`wide`: a model's linear layers on our kernel for as long as a context lasts, and not a moment longer."""

import pytest
import torch
from torch import nn

from longgraft.kernels import rows_linear as kernel
from longgraft.linear import pays, wide

native = pytest.mark.skipif(not kernel.is_available(), reason="the native kernels are not built")


class Scaled(nn.Linear):
    """A subclass: its forward is its own affair."""

    def forward(self, input):
        return 2 * super().forward(input)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(48, 70), Scaled(70, 70), nn.Linear(70, 48, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.scaled(self.first(x))))


@pytest.fixture(autouse=True)
def quiet():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    return Model().to(torch.bfloat16).eval()


def own_forwards(model):
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@native
def test_rows_agree_bitwise_within(model):
    x = torch.randn(19, 48).bfloat16()
    plain = model(x)
    with wide(model, always=True) as context:
        assert context.name == kernel.KERNEL
        assert context.layers == [model.first, model.last]
        first = model.first(x)
        assert torch.equal(first, kernel.rows_linear(x, model.first.weight, model.first.bias))
        assert torch.equal(model.first(x[4:5]), first[4:5])
        assert torch.allclose(model(x), plain, atol=0.02, rtol=0.02)
    assert own_forwards(model) == []
    assert torch.equal(model(x), plain)


@native
def test_restored_after_an_error_and_when_nested(model):
    context = wide(model, always=True)
    with pytest.raises(KeyError), context:
        assert own_forwards(model) == ["first", "last"]
        raise KeyError
    assert own_forwards(model) == []
    with context, context, wide(model.first, always=True):
        assert own_forwards(model) == ["first", "last"]
    assert own_forwards(model) == []


@native
def test_two_contexts_may_overlap(model):
    one, two = wide(model, always=True), wide(model, always=True)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert own_forwards(model) == ["first", "last"]
    two.__exit__(None, None, None)
    assert own_forwards(model) == []


@native
def test_a_layer_with_its_own_forward_is_left_alone(model):
    model.first.forward = own = lambda x: torch.zeros(len(x), 70, dtype=x.dtype)
    with wide(model, always=True):
        assert model.first.forward is own
    assert model.first.__dict__["forward"] is own
    late = wide(model, always=True)
    with late:
        model.last.forward = own
    assert model.last.__dict__["forward"] is own


@native
def test_parameters_are_read_at_each_call(model):
    x = torch.randn(3, 48).bfloat16()
    with wide(model, always=True):
        model.first.bias = None
        unbiased = model.first(x)
        model.first.weight.mul_(2)
        assert torch.equal(model.first(x), 2 * unbiased)
        model.to(torch.float64)
        assert model.first(x.double()).dtype == torch.float64


@native
def test_gradients_still_flow(model):
    with wide(model, always=True), torch.enable_grad():
        model(torch.randn(3, 48).bfloat16()).sum().backward()
    assert model.first.weight.grad.abs().sum() > 0


@native
def test_hooks_and_state_are_untouched(model):
    seen = []
    model.first.register_forward_hook(lambda *args: seen.append(args[2].shape))
    names = list(model.state_dict())
    with wide(model, always=True):
        model(torch.randn(3, 48).bfloat16())
        assert list(model.state_dict()) == names
    assert seen == [(3, 70)]


@native
def test_adapters_stay_right():
    peft = pytest.importorskip("peft")
    base = Model().eval()
    config = peft.LoraConfig(r=4, target_modules=["first", "last"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    x = torch.randn(5, 48)
    plain = adapted(x)
    with wide(adapted, always=True) as context:
        assert len(context.layers) == 6
        assert torch.allclose(adapted(x), plain, atol=1e-5)
    assert torch.equal(adapted(x), plain)


def test_which_dtypes_pay(monkeypatch):
    monkeypatch.setattr(kernel, "KERNEL", "avx512")
    monkeypatch.setattr(kernel, "THREADS", "libgomp")
    monkeypatch.setattr(kernel, "multiplies", lambda dtype: dtype is torch.bfloat16)
    assert not pays(torch.bfloat16)
    assert pays(torch.float16)
    assert pays(torch.bfloat16, always=True)
    assert pays(torch.float32)
    assert not pays(torch.float64, always=True)
    monkeypatch.setattr(kernel, "KERNEL", "avx2")
    assert not pays(torch.float32)
    assert pays(torch.float16)
    monkeypatch.setattr(kernel, "THREADS", "none")
    assert pays(torch.float16)
    torch.set_num_threads(2)
    assert not pays(torch.float16)
    assert pays(torch.float16, always=True)
    monkeypatch.setattr(kernel, "KERNEL", None)
    assert not pays(torch.float16, always=True)


def test_without_a_native_module_nothing_happens(monkeypatch, model):
    monkeypatch.setattr(kernel, "KERNEL", None)
    with wide(model, always=True) as context:
        assert context.name == "torch"
        assert own_forwards(model) == []


def test_layers_that_do_not_fit_are_left_out():
    model = Model().double()
    model.last = nn.Linear(70, 48, dtype=torch.bfloat16, device="meta")
    assert wide(model, always=True).layers == []
