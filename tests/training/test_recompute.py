"""Activation checkpointing and offload: bit for bit the step that saves everything, in less memory."""

import copy
import functools
import itertools
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ligermodels.arch import ARCHS, block as arch_block, inputs
from ligermodels.errors import InputError
from ligermodels.kernels import route
from ligermodels.layers import Batch, MoE
from ligermodels.training import count_expert_loads, offload, recompute, update_router_biases
from ligermodels.training.offload import Offload, OffloadPass
from tests.kernels.on_gpu import never_waits
from tests.parallel.train import CONFIG

FAMILIES = {
    "llama": {},
    "gemma": dict(head_dim=8),
    "mistral": dict(sliding_window=6),
    "qwen2": {},
    "qwen3": dict(head_dim=8),
    "phi3": dict(pad_token_id=0),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=6),
    "mixtral": dict(num_local_experts=4, output_router_logits=True, router_jitter_noise=0.1),
    "qwen3_5_text": dict(
        head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    ),
}  # fmt: skip
POLICIES = list(itertools.product(["none", "mlp", "block"], [False, True]))
SOME = [("none", True), ("mlp", False), ("block", True)]


@pytest.fixture(autouse=True)
def _small_tensors_travel(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1)


@pytest.fixture
def ids():
    return torch.randint(97, (2, 16))


def make(family="llama", device="cpu", dtype=torch.float32, activation_checkpointing="none", **sizes):
    return ARCHS[family].from_config(
        {**CONFIG, "num_hidden_layers": 3, "model_type": family, **FAMILIES.get(family, {}), **sizes},
        dtype=dtype,
        device=device,
        activation_checkpointing=activation_checkpointing,
        seed=0,
    )


def enable(model, recompute, offload=False, **settings):
    model.gradient_checkpointing_enable({"recompute": recompute, "offload": offload, **settings})


def step(model, ids, **inputs):
    """Loss and every gradient; jitter is drawn from the same seed each time."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(found, expected):
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def buffers(model):
    """Addresses of all free host buffers."""
    lanes = model.decoder.checkpointing.offload._streams.values()
    return {buffer.data_ptr() for lane in lanes for free in lane.buffers.values() for buffer in free}


class TestBits:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_policy_gives_the_bits_of_saving_everything(self, family, ids):
        model = make(family)
        expected = step(model, ids)
        for policy, some in itertools.product(POLICIES, [{}, {"blocks": 2}]):
            enable(model, *policy, **some)
            assert_same(step(model, ids), expected)

    @pytest.mark.parametrize("policy", SOME, ids=str)
    def test_several_backwards(self, policy, ids):
        model, other = make(), ids.flip(1)
        expected, summed = step(model, ids), step(model, ids)[1:]
        for total, grad in zip(summed, step(model, other)[1:], strict=True):
            total += grad
        enable(model, *policy)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        weight = model.decoder.layers[1].self_attn.o_proj.weight
        (partly,) = torch.autograd.grad(loss, weight, retain_graph=True)
        loss.backward(retain_graph=True)
        assert_same([loss, *(p.grad for p in model.parameters())], expected)
        assert torch.equal(partly, weight.grad)
        model.zero_grad()
        loss.backward()
        assert_same([loss, *(p.grad for p in model.parameters())], expected)
        model.zero_grad()
        first, second = model(ids, labels=ids).loss, model(other, labels=other).loss
        first.backward()
        second.backward()
        assert_same([p.grad for p in model.parameters()], summed)

    def test_under_autocast_where_x_and_residual_differ_in_dtype(self, ids):
        model = make()
        with torch.autocast("cpu", torch.bfloat16):
            expected = step(model, ids)
            for policy in SOME:
                enable(model, *policy)
                assert_same(step(model, ids), expected)

    def test_without_gradients_nothing_changes(self, ids):
        model = make()
        with torch.no_grad():
            logits, cached = model(ids).logits, model(ids, use_cache=True).logits
        states = model(ids, output_hidden_states=True).hidden_states
        for policy in SOME:
            enable(model, *policy)
            with torch.no_grad():
                assert torch.equal(model(ids).logits, logits)
            assert torch.equal(model(ids, use_cache=True).logits, cached)  # not recomputed: the cache is written once
            assert_same(model(ids, output_hidden_states=True).hidden_states, states)


@pytest.fixture
def late(monkeypatch):
    """Copies run as late as streams allow: in order, when somebody waits for them. Memory that is freed before that
    fails them."""
    queue = []

    class Stream:
        def wait_event(self, event):
            while queue and queue[0][0] <= event.number:
                _, *places = queue.pop(0)
                target, source = (torch.UntypedStorage._new_with_weak_ptr(place.cdata) for place in places)
                assert target is not None and source is not None, "its memory was freed before the copy"
                size = min(len(target), len(source))
                target[:size].copy_(source[:size])

    class Event:
        number = 0

    class Module:
        current_stream = staticmethod(lambda device: Stream())

    def copy_late(lane, pairs, held):
        event, lane.module = Event(), Module
        event.number = Event.number = Event.number + 1
        queue.extend((event.number, *(StorageWeakRef(t.untyped_storage()) for t in pair)) for pair in pairs)
        return offload._Copies(Stream(), event, held)

    monkeypatch.setattr(offload.CopyStream, "_copy", copy_late)
    return queue


class TestStreams:
    @pytest.mark.parametrize(
        "policy, some", [("none", {}), ("mlp", {"blocks": 2}), ("block", {"every_n_layers": 2})], ids=str
    )
    def test_nothing_is_read_or_freed_before_its_copy(self, policy, some, ids, late):
        model = make(num_hidden_layers=5)
        expected = step(model, ids)
        enable(model, policy, offload=True, **some)
        for _ in range(2):
            assert_same(step(model, ids), expected)
        assert not late
        handle = model.decoder.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, ids)
        handle.remove()
        failing = []
        model.decoder.layers[2].self_attn.o_proj.register_full_backward_hook(lambda *_: 1 / 0 if failing else None)
        losses = [model(ids, labels=ids).loss for _ in range(3)]
        failing.append(True)
        with pytest.raises(ZeroDivisionError):
            losses.pop().backward()
        failing.clear()
        assert not late  # the copies for the next block have been waited for
        while losses:
            model.zero_grad()
            losses.pop().backward()
            assert_same([p.grad for p in model.parameters()], expected[1:])


def through_blocks(model, x):
    """x through the blocks alone -> (the output, how many outputs of blocks are alive when each block begins)."""
    given, alive = [], []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: alive.append(sum(ref() is not None for ref in given)))
        layer.register_forward_hook(lambda layer, inputs, outputs: given.extend(map(weakref.ref, outputs[:2])))
    rotary = {"full": model.decoder.rotary_emb(torch.arange(x.shape[1])[None])}
    run = model.decoder.checkpointing.start(x, len(model.decoder.layers))
    residual, batch = None, Batch(rotary=rotary)
    for i, layer in enumerate(model.decoder.layers):
        x, residual, *_ = run(i, layer, x, residual, batch)
    return x + residual, alive


class TestMemory:
    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_block_saves_one_tensor_of_each_block(self, family):
        model, kept = make(family, activation_checkpointing="block"), []
        with saved_tensors_hooks(lambda t: kept.append(t.shape) or t.detach(), lambda t: t):
            _, alive = through_blocks(model, torch.randn(2, 16, 32))
        assert [shape for shape in kept if shape.numel()] == [(2, 16, 32)] * 3  # those without elements are torch's own
        assert alive == [0, 0, 0]  # what the block before gave, of which the sum alone is needed

    def test_saved_tensors_leave_the_device_and_come_back_for_the_backward(self, monkeypatch):
        monkeypatch.setattr(offload, "SMALLEST", 512)  # above the tables of the rotation, which all blocks share
        model, sent, brought = make(num_hidden_layers=5), [], []
        enable(model, "none", offload=True)
        send, bring = offload.CopyStream.send, offload.CopyStream.fetch

        def sends(stream, tensor, buffer):
            sent.append(StorageWeakRef(tensor.untyped_storage()))
            return send(stream, tensor, buffer)

        def brings(stream, storages):
            assert sum(any(ref() is not None for ref in refs) for refs in brought) <= 1  # two blocks at a time
            bring(stream, storages)
            brought.append([weakref.ref(storage.on_device) for storage in storages])

        monkeypatch.setattr(offload.CopyStream, "send", sends)
        monkeypatch.setattr(offload.CopyStream, "fetch", brings)
        x, _ = through_blocks(model, torch.randn(2, 16, 32))
        assert sent and all(memory.expired() for memory in sent)
        x.sum().backward()
        assert len(brought) == 4 and not any(ref() is not None for refs in brought for ref in refs)

    def test_what_the_backward_does_not_read_is_not_fetched(self):
        def block(x):
            x.exp()  # saves a tensor for a backward that nothing asks for
            return [x * x]

        blocks, x = OffloadPass(Offload(), [0], 2), torch.full([3], 2.0, requires_grad=True)
        blocks.run(1, block, *blocks.run(0, block, x))[0].sum().backward()
        assert x.grad.tolist() == [32.0] * 3

    def test_memory_is_sent_once_and_again_when_its_contents_changed(self):
        pack = functools.partial(OffloadPass(Offload(), [0, 1], 2).pack, 0, [])
        memory = torch.arange(24.0).view(4, 6)
        views = [memory, memory[:, 2:4], memory.t()[1:], memory.to(torch.float64)[2], memory[3:, :0]]
        expected = [view.clone() for view in (*views, memory + 1)]
        packed = [pack(view) for view in views]
        assert len({id(view.storage) for view in packed}) == 2
        memory.add_(1)
        packed.append(pack(memory))
        assert len({id(view.storage) for view in packed}) == 3
        del memory, views
        assert_same(list(map(offload._unpack, packed)), expected)
        assert all(view.storage.on_device is None for view in packed), "what has been read is left to the reader"


class TestSettings:
    def test_what_is_no_policy(self):
        for settings, message in [
            ("blocks", "'none', 'mlp', 'block'"),
            ({"recompute": "all"}, "'all' is not supported"),
            ({"blocks": 4}, "blocks=4 must be a number of the model's blocks, 0 to 3"),
            ({"recompute": "mlp", "early_stop": False}, "'early_stop' of torch.utils.checkpoint"),
        ]:
            with pytest.raises(InputError, match=message):
                make(activation_checkpointing=settings)

    def test_the_argument_of_a_model_is_the_dict_of_its_method(self, tmp_path):
        model = make()
        folder = model.save_pretrained(tmp_path / "model")
        assert not model.is_gradient_checkpointing and not model.gradient_checkpointing
        settings = {"recompute": "mlp", "blocks": 2, "offload": True}
        loaded = type(model).from_hub(folder, progress=False, activation_checkpointing=settings)
        model.gradient_checkpointing_enable(settings)
        assert loaded.is_gradient_checkpointing and model.gradient_checkpointing
        for one in (loaded, model):
            assert [layer.mlp.recompute for layer in one.decoder.layers] == [True, True, False]
        model.gradient_checkpointing_enable({"recompute": "block", "every_n_layers": 2})
        assert [layer.mlp.recompute for layer in model.decoder.layers] == [True, False, True]
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing and not any(layer.mlp.recompute for layer in model.decoder.layers)

    @pytest.mark.parametrize("family, ends", [("llama", True), ("gemma2", False)])
    def test_which_mlps_recompute(self, family, ends):
        """Under "block" those that end their block, whose second run stops before their matmuls. Before a norm, as in
        Gemma 2, an MLP that recomputed would run a third time."""
        model = make(family)
        for policy, expected in (("none", False), ("mlp", True), ("block", ends)):
            enable(model, policy)
            assert [layer.mlp.recompute for layer in model.decoder.layers] == [expected] * 3, policy

    def test_names_of_transformers(self):
        model = make()
        with pytest.warns(UserWarning, match="use_reentrant=True is not used here"):
            model.activation_checkpointing_enable({"use_reentrant": True}, every_n_layers=2, offload=True)
        policy = model.decoder.checkpointing
        assert [policy.covers(i) for i in range(3)] == [True, False, True] and policy.offload is not None
        model.activation_checkpointing_disable()
        assert not model.is_gradient_checkpointing

    def test_while_a_graph_is_captured(self, monkeypatch, ids):
        model = make("mixtral").train()
        enable(model, "block")
        monkeypatch.setattr(recompute, "is_captured", lambda x: True)
        with pytest.raises(InputError, match="dropout or router jitter"):
            model(ids)
        expected = step(model.eval(), ids)
        called = []
        monkeypatch.setattr(torch, "get_rng_state", lambda: called.append(1))  # which raises there
        assert_same(step(model, ids), expected)
        assert not called
        enable(model, "none", offload=True)
        with pytest.raises(InputError, match="offload=True runs neither"):
            model(ids)
        mask = torch.ones_like(ids)
        model.gradient_checkpointing_disable()
        monkeypatch.setattr(inputs, "is_captured", lambda x: True)
        positions = torch.arange(16)[None]
        with pytest.raises(InputError, match="give cu_seqlens and max_seqlen"):
            model(ids, position_ids=positions)
        model(ids, position_ids=positions, attention_mask=mask)
        bounds = torch.tensor([0, 16, 32], dtype=torch.int32)
        model(ids, position_ids=positions, cu_seqlens=bounds, max_seqlen=16)


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.fixture(autouse=True)
    def _small_tensors_travel(self):
        """They stay."""

    @pytest.fixture
    def ids(self):
        return torch.randint(97, (4, 2048), device="cuda")

    @pytest.fixture
    def model(self):
        """With a window attention is our own, whose gradients sum in one order, as those of torch's do not: what has
        other bits the next time has read other numbers."""
        sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, initializer_range=0.02)
        return make("mistral", "cuda", torch.bfloat16, sliding_window=1024, **sizes)

    @pytest.mark.parametrize("policy", ["none", "mlp", "block"])
    def test_many_steps_with_offload_have_the_bits_of_those_without(self, model, ids, policy):
        twin = copy.deepcopy(model)
        enable(model, policy)
        enable(twin, policy, offload=True)
        for i in range(8):
            batch, grads = ids.roll(i, 1)[:, : 2048 - 8 * (i % 3)], []
            for one in (model, model, twin):
                one.zero_grad()
                one(batch, labels=batch).loss.backward()
                torch.cuda._sleep(10**7 * (i % 2))  # so that the host is far ahead, or is not
                grads.append([parameter.grad for parameter in one.parameters()])
            again, expected, found = grads
            assert_same(again, expected)  # without offload: where this fails, bits say nothing of memory
            assert_same(found, expected)
            with torch.no_grad():
                for parameter in (*model.parameters(), *twin.parameters()):
                    parameter -= 0.1 * parameter.grad

    def test_what_is_kept_leaves_the_device(self, model, ids):
        """Of 12 blocks at most three are there at a time: two in the forward, two and the last one in the backward.

        Gradients, and what the head and one block need for a while, are in all numbers."""
        most = []
        for offloads, blocks in ((False, None), (True, None), (True, 6)):
            enable(model, "none", offload=offloads, blocks=blocks)
            for _ in range(2):
                model.zero_grad()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model(ids, labels=ids).loss.backward()
                torch.cuda.synchronize()
            most.append(torch.cuda.max_memory_allocated() - before)
        assert most[1] < 0.6 * most[0]
        assert most[2] < 0.8 * most[0]  # five of the blocks

    def test_the_host_never_waits(self, model, ids):
        enable(model, "mlp", offload=True)
        for _ in range(2):
            model(ids).logits.sum().backward()
        there = buffers(model)
        with never_waits():
            model(ids).logits.sum().backward()
        assert buffers(model) == there

    def test_a_step_is_captured(self, model, ids):
        enable(model, "block")

        def run():
            model.zero_grad()
            model(ids).logits.float().square().mean().backward()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        found = [parameter.grad for parameter in model.parameters()]
        ids.copy_(ids.flip(1))
        graph.replay()
        found = [grad.clone() for grad in found]
        run()
        assert_same(found, [parameter.grad for parameter in model.parameters()])


BALANCED = dict(score="sigmoid", correction_bias=True, scale=2.5, shared_size=8)


def balanced(monkeypatch, family="mixtral", **options):
    """A mixture whose routers have a bias, which no family of the zoo has."""
    monkeypatch.setattr(arch_block, "MoE", functools.partial(MoE, **BALANCED | options))
    return make(family, router_jitter_noise=0.0).train()


def loads_of(model, ids):
    """[layers, E]: the tokens of each expert in a forward, from the router logits."""
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    gates = [layer.mlp.gate for layer in model.decoder.layers]
    routes = [
        route(x, top_k=2, score="sigmoid", bias=gate.e_score_correction_bias)[1]
        for x, gate in zip(logits, gates, strict=True)
    ]
    return torch.stack([experts.long().flatten().bincount(minlength=4) for experts in routes])


def counted(model):
    return torch.stack([layer.mlp.expert_loads for layer in model.decoder.layers])


@pytest.mark.parametrize("policy", ["none", "mlp", "block", "torch"])
def test_each_token_counts_once_among_the_loads_of_experts(monkeypatch, ids, policy):
    """In training alone, whatever is recomputed, by our checkpointing or by torch's around a layer."""
    model = balanced(monkeypatch)
    assert count_expert_loads(model) and not count_expert_loads(make())
    if policy == "torch":
        for layer in model.decoder.layers:
            layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    else:
        enable(model, policy)
    expected = loads_of(model, ids) + loads_of(model, ids.flip(0, 1))
    assert not counted(model).any()  # without gradients
    for batch in (ids, ids.flip(0, 1)):
        model(batch, labels=batch).loss.backward()
    model.eval()(ids, labels=ids)
    assert torch.equal(counted(model), expected) and (expected.sum(1) == 2 * 2 * ids.numel()).all()
    assert not [name for name in model.state_dict() if "loads" in name]


def test_the_biases_of_routers_follow_the_loads(monkeypatch, ids):
    """Each by the rate, towards the mean; then it is counted from 0, and the choice follows the biases."""
    model = balanced(monkeypatch)
    with pytest.raises(InputError, match=r"not counted; call .*count_expert_loads"):
        update_router_biases(model)
    count_expert_loads(model)
    expected, before = torch.zeros(3, 4), []
    for _ in range(30):
        loads = loads_of(model, ids).double()
        expected += 0.01 * torch.sign(loads.mean(1, keepdim=True) - loads)
        model(ids, labels=ids).loss.backward()
        before.append(update_router_biases(model, rate=0.01).item())
        assert before[-1] == pytest.approx((loads.amax(1) / loads.mean(1)).max().item())
    assert not counted(model).any() and before[-1] < before[0] - 0.1
    assert update_router_biases(model, rate=0.0) == 0
    biases = torch.stack([layer.mlp.gate.e_score_correction_bias for layer in model.decoder.layers])
    torch.testing.assert_close(biases, expected)
    plain = balanced(monkeypatch, correction_bias=False)
    count_expert_loads(plain)
    with pytest.raises(InputError, match="no router of this Mixtral has a correction bias; leave"):
        update_router_biases(plain)
