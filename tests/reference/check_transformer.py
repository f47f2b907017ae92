"""check_transformer.py LIBRARY [NAME...] - whole transformers beside the transformers library: GPT-2, Llama, Mistral and BERT.

LIBRARY is a shared library made of shim_transformer.c and the implementation of amp.h; names are of MODELS. transformers makes
models with random weights, which the checkpoint functions carry over in files; nothing is downloaded. Truth is their model in
float64 (with RMS norms in float64 too, where their code has float32; angles stay float32). In FP32 the bounds are numbers. In 16
bits torch is the measure, computing in the same types: torch.autocast for O1, a model and gradients of that type with float32
masters for O2. There we may be twice as far from the truth as torch is, and a few roundings.
"""
import ctypes
import os
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers.pytorch_utils import Conv1D

import check_model
from check_model import ADAMW, CASES, F16, F32, NAME, O0, O1, O2, SGD, TORCH, UNIT, check

BATCH, VOCABULARY, STEPS = 3, 97, 20
T = 20          # positions
LONGER = 72     # of Mistral: attention is formed in blocks of 64
APPLIED, SKIPPED_OVERFLOW, SKIPPED_MODEL = 0, 2, 3
GPT2, LLAMA, BERT = 0, 1, 2
IGNORED = -100
SCALE = 1024.0
ADAM_EPS = 1e-6     # with 1e-8 a gradient of nothing but roundings becomes a step as large as any


class Config(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("kind", "batch", "positions", "width", "heads", "kv_heads", "blocks", "hidden", "rows",
                                              "classes", "fused", "whole", "tied", "window", "ignores", "ignored", "level", "low",
                                              "optimizer")]
    _fields_ += [(n, ctypes.c_float) for n in ("eps", "theta", "lr", "weight_decay", "adam_eps", "scale")]


COMMON = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager", vocab_size=VOCABULARY)


def gpt2(sd=0.2):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=T, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=sd,
        **COMMON))


def llama(sd=0.2):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=T, rms_norm_eps=1e-5, initializer_range=sd, **COMMON))


def tied_llama(sd=0.2):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        max_position_embeddings=T, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, initializer_range=sd, **COMMON))


def mistral(sd=0.2):
    return transformers.MistralForCausalLM(transformers.MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        max_position_embeddings=LONGER, rms_norm_eps=1e-6, sliding_window=6, initializer_range=sd, **COMMON))


def bert(sd=0.2):
    return transformers.BertForTokenClassification(transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=T,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=11, initializer_range=sd, **COMMON))


# Name, their model, and what ours needs to know beside sizes.
MODELS = [("GPT-2", gpt2, dict(kind=GPT2, width=32, kv_heads=4, hidden=128, tied=1, eps=1e-5)),
          ("Llama", llama, dict(kind=LLAMA, width=48, kv_heads=2, hidden=80, eps=1e-5)),
          ("tied Llama", tied_llama, dict(kind=LLAMA, width=32, kv_heads=1, hidden=64, tied=1, eps=1e-6, theta=500.0)),
          ("fused Llama", llama, dict(kind=LLAMA, fused=1, width=48, kv_heads=2, hidden=80, eps=1e-5)),
          ("Mistral", mistral, dict(kind=LLAMA, positions=LONGER, width=32, kv_heads=4, hidden=64, window=6,
                                    eps=1e-6)),
          ("BERT", bert, dict(kind=BERT, width=32, kv_heads=4, hidden=64, classes=11, eps=1e-12))]


def load(path):
    lib = check_model.load(path)
    p, i = ctypes.c_void_p, ctypes.c_int
    for name, types in (("new", [p]), ("free", [p]), ("model", [p]), ("param_name", [p, i]), ("save", [p, ctypes.c_char_p]),
                        ("load", [p, ctypes.c_char_p]), ("step", [p] * 4 + [i, i] + [p] * 3), ("predict", [p] * 3 + [i, i, p, p]),
                        ("evaluate", [p] * 4 + [i, i] + [p] * 3), ("generate", [p, p, i, p, i])):
        getattr(lib, "shim_text_" + name).argtypes = types
    lib.shim_text_new.restype = lib.shim_text_model.restype = ctypes.c_void_p
    lib.shim_text_param_name.restype = ctypes.c_char_p
    lib.folder = tempfile.TemporaryDirectory()
    return lib


def exact_norm(norm):
    return lambda x: norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def twins(which, seed):
    """A model in float32 and its copy in float64, whose biases and norms are no longer 0 and 1."""
    torch.manual_seed(seed)
    single, double = MODELS[which][1]().eval(), MODELS[which][1]().double().eval()
    for module in double.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = exact_norm(module)
    with torch.no_grad():
        for p in single.parameters():
            if p.dim() == 1:
                p += 0.2 * torch.randn_like(p)
    double.load_state_dict(single.state_dict())
    return single, double


class Data:
    """Tokens, each one's label, and positions that count, at most `positions`. A tenth of the labels is `ignored`; None: none."""

    def __init__(self, which, seed, n=BATCH, positions=None, lengths=None, ignored=IGNORED):
        positions = positions or MODELS[which][2].get("positions", T)
        rng = np.random.default_rng(seed)
        text = rng.integers(0, VOCABULARY, (n, positions + 1)).astype(np.int32)
        self.tokens, self.labels = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
        self.types, self.ignored = None, IGNORED if ignored is None else ignored
        if MODELS[which][2]["kind"] == BERT:
            self.types = rng.integers(0, 2, (n, positions)).astype(np.int32)
            self.labels = rng.integers(0, 11, (n, positions)).astype(np.int32)
        if ignored is not None:
            self.labels[rng.random((n, positions)) < 0.1] = ignored
        shortest = positions + 1 - MODELS[which][2].get("window", positions)    # torch has NaN where a query sees nothing
        self.lengths = None if lengths is None else np.clip(lengths, shortest, positions).astype(np.int32)
        self.counts = np.arange(positions) < (np.full((n, 1), positions) if lengths is None else self.lengths[:, None])
        self.truth = torch.from_numpy(np.where(self.counts, self.labels, np.int32(self.ignored))).long()


def logits_of(model, d):
    more = {} if d.types is None else {"token_type_ids": torch.from_numpy(d.types).long()}
    return model(torch.from_numpy(d.tokens).long(), attention_mask=torch.from_numpy(d.counts).long(), **more).logits


def loss_of(logits, d):
    return F.cross_entropy(logits.flatten(0, 1), d.truth.flatten(), ignore_index=d.ignored)


def address(a):
    return None if a is None else a.ctypes.data


def is_transposed(model, name):
    """Is that the weight of a Conv1D, [in, out]?"""
    return name.endswith(".weight") and isinstance(model.get_submodule(name[:-7]), Conv1D)


def parameters(model, fused, of, turned=True):
    """Their parameters, or what `of` makes of each, by name, with ours' order of elements; turned=False: with theirs, the files'."""
    made = {name: of(p).t().contiguous() if turned and is_transposed(model, name) else of(p) for name, p in model.named_parameters()}
    for name in [n for n in made if fused and "q_proj" in n]:
        made[name.replace("q_proj", "qkv_proj")] = torch.cat([made.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"])
    return made


def tensors(which, model, of):
    """The same in float64, rows of numbers."""
    return {name: p.detach().double().numpy().ravel() for name, p in parameters(model, MODELS[which][2].get("fused"), of).items()}


class Ours:
    """Our model. fill: rows that fill up the vocabulary; whole: of amp_transformer_block."""

    def __init__(self, lib, which, level=O0, low=F32, optimizer=SGD, lr=0.0, weight_decay=0.0, adam_eps=0.0, scale=1.0, fill=0,
                 whole=0, ignored=IGNORED):
        self.lib = lib
        c = Config(batch=BATCH, positions=T, heads=4, blocks=2, rows=VOCABULARY + fill, classes=VOCABULARY, whole=whole,
                   ignores=ignored is not None, ignored=ignored or 0, level=level, low=0 if low == F32 else low,
                   optimizer=optimizer, lr=lr or -1.0,     # AMP_ZERO: really zero
                   weight_decay=weight_decay or -1.0, adam_eps=adam_eps, scale=scale)
        for name, value in MODELS[which][2].items():
            setattr(c, name, value)
        self.features, self.fused = c.classes if c.kind == BERT else c.rows, c.fused
        self.t = lib.shim_text_new(ctypes.byref(c))
        assert self.t
        m = lib.shim_text_model(self.t)
        self.weights, self.gradients = {}, {}
        for i in range(lib.shim_model_params(m)):
            name, size = lib.shim_text_param_name(self.t, i).decode(), (lib.shim_model_param_size(m, i),)
            self.weights[name] = np.ctypeslib.as_array(lib.shim_model_weights(m, i), size)
            self.gradients[name] = np.ctypeslib.as_array(lib.shim_model_gradient(m, i), size)

    def __del__(self):
        self.lib.shim_text_free(self.t)

    def path(self, name):
        return os.path.join(self.lib.folder.name, name)

    def put(self, model, fill=None):
        """fill: values of the rows that fill up the vocabulary, in each table of its height."""
        state = parameters(model, self.fused, lambda p: p.detach().float(), turned=False)
        for name, p in state.items():
            if fill is not None and p.dim() == 2 and p.shape[0] == VOCABULARY:
                state[name] = torch.cat([p, fill(p)])
        safetensors.torch.save_file(state, self.path("put.safetensors"))
        count = self.lib.shim_text_load(self.t, self.path("put.safetensors").encode())
        assert count == len(state) == len(self.weights), (count, len(state), len(self.weights))

    def state(self, model):
        """The tensors of a checkpoint that are weights, as `model` wants them."""
        assert self.lib.shim_text_save(self.t, self.path("model.safetensors").encode()) == 0
        state = safetensors.torch.load_file(self.path("model.safetensors"))
        state = {name: state[name] for name in self.weights}
        if "lm_head.weight" in model.state_dict() and "lm_head.weight" not in state:
            state["lm_head.weight"] = next(w for w in state.values() if w.shape == model.lm_head.weight.shape)
        return state

    def step(self, d):
        """Outcome, loss and culprit."""
        loss, culprit = ctypes.c_float(), ctypes.create_string_buffer(136)
        outcome = self.lib.shim_text_step(self.t, address(d.tokens), address(d.types), address(d.labels), *d.tokens.shape,
                                          address(d.lengths), ctypes.byref(loss), culprit)
        return outcome, loss.value, culprit.value.decode()

    def evaluate(self, d):
        loss, counts = ctypes.c_float(), (ctypes.c_int64 * 2)()
        assert self.lib.shim_text_evaluate(self.t, address(d.tokens), address(d.types), address(d.labels), *d.tokens.shape,
                                           address(d.lengths), ctypes.byref(loss), counts) == 0
        return loss.value, counts[0], counts[1]

    def predict(self, d):
        out = np.empty(d.tokens.shape + (self.features,), np.float32)
        assert self.lib.shim_text_predict(self.t, address(d.tokens), address(d.types), *d.tokens.shape, address(d.lengths),
                                          out.ctypes.data) == 0
        return out

    def generate(self, prompt, count):
        prompt, out = np.array(prompt, np.int32), np.empty(count, np.int32)
        assert self.lib.shim_text_generate(self.t, prompt.ctypes.data, len(prompt), out.ctypes.data, count) == 0
        return out.tolist()


def off(ours, truth):
    """The largest error of any tensor, relative to the largest value in it, and that tensor."""
    return max((np.abs(ours[n].astype(np.float64) - truth[n]).max() / np.abs(truth[n]).max(), n) for n in truth)


def without_key_biases(which, tensors):
    """A key's bias adds the same to all scores of a query, so its gradient is 0 but for roundings; Adam makes steps of these."""
    kept = {name: a for name, a in tensors.items() if not name.endswith(".key.bias")}
    for name in kept:
        if name.endswith("c_attn.bias"):
            kept[name] = np.delete(kept[name], slice(len(kept[name]) // 3, 2 * len(kept[name]) // 3))
    return kept


class Torch:
    """Their model in the types of a level: `single` has the float32 masters."""

    def __init__(self, which, single, level, low):
        self.single, self.level, self.low = single, level, TORCH[low]
        self.scale = SCALE if low == F16 else 1.0
        self.model = MODELS[which][1]().eval().to(self.low) if level == O2 else single

    def logits(self, d):
        if self.level == O2:
            self.model.load_state_dict(self.single.state_dict())
        with torch.autocast("cpu", dtype=self.low or torch.bfloat16, enabled=self.level == O1):
            return logits_of(self.model, d)

    def backward(self, d):
        self.single.zero_grad()
        self.model.zero_grad()
        logits = self.logits(d)
        loss = loss_of(logits if logits.dtype == torch.float64 else logits.float(), d)
        (loss * self.scale).backward()
        for p, q in zip(self.single.parameters(), self.model.parameters()):
            p.grad = q.grad.to(p.dtype) / self.scale
        return loss.item(), logits.detach().double().numpy()


def ours_scaled(lib, which, level, low, **more):
    return Ours(lib, which, level, low, scale=SCALE if low == F16 else 1.0, **more)


def bounds(low):
    """Of values, and of losses, which are means of many: a few roundings in 16 bits, and how often torch's error is added."""
    return 4 * UNIT[low], 2 * UNIT[low], 2


def passes(lib, which):
    """Logits, loss and gradients; in the second pass with lengths, in the third in a shorter batch without an
    ignored label, too."""
    name = MODELS[which][0]
    for seed, more in enumerate([{}, {"lengths": [LONGER, 7, 13]}, {"n": 2, "positions": 11, "lengths": [11, 3], "ignored": None}]):
        d = Data(which, seed, **more)
        single, double = twins(which, seed)
        truth, wanted = Torch(which, double, O0, F32).backward(d)
        wanted_g = without_key_biases(which, tensors(which, double, lambda p: p.grad))
        for level, low in CASES:
            theirs = Torch(which, single, level, low)
            torch_loss, torch_logits = theirs.backward(d)
            torch_g = without_key_biases(which, tensors(which, single, lambda p: p.grad))
            ours = ours_scaled(lib, which, level, low, ignored=more.get("ignored", IGNORED))
            ours.put(single)
            logits = ours.predict(d)
            outcome, loss, _ = ours.step(d)
            g = without_key_biases(which, {n: a / theirs.scale for n, a in ours.gradients.items()})
            largest = np.abs(wanted[d.counts]).max()
            error, torch_error = (np.abs(x - wanted)[d.counts].max() / largest for x in (logits, torch_logits))
            (worst, at), (torch_worst, _) = off(g, wanted_g), off(torch_g, wanted_g)
            distances = [check_model.distance([x[n] for n in wanted_g], list(wanted_g.values()))[0] for x in (g, torch_g)]
            text = f"{name} O{level} {NAME[low]} #{seed}"
            check(outcome == APPLIED, f"{text}: outcome {outcome}")
            if low == F32:
                check(torch_error <= 4e-6, f"{text}: torch in float32 is off by {torch_error:.3g}")
                check(error <= 2e-6, f"{text}: logits off by {error:.3g}, torch's by {torch_error:.3g}")
                check(abs(loss - truth) <= 1e-6 * truth, f"{text}: loss {loss}, in float64 {truth}")
                check(worst <= 1e-5, f"{text}: the gradient of {at} is off by {worst:.3g}, torch's worst by {torch_worst:.3g}")
            else:
                few, few_losses, times = bounds(low)
                check(error <= few + times * torch_error, f"{text}: logits off by {error:.3g}, torch's by {torch_error:.3g}")
                check(abs(loss - truth) <= few_losses * truth + times * abs(torch_loss - truth),
                      f"{text}: loss {loss}, torch {torch_loss}, in float64 {truth}")
                check(distances[0] <= few + times * distances[1],
                      f"{text}: gradients off by {distances[0]:.3g}, torch's by {distances[1]:.3g}")
                check(worst <= few + times * torch_worst,
                      f"{text}: the gradient of {at} is off by {worst:.3g}, torch's worst by {torch_worst:.3g}")
            print(f"{text}: logits off by {error:.2g} (torch's {torch_error:.2g}), loss by {abs(loss / truth - 1):.2g} "
                  f"({abs(torch_loss / truth - 1):.2g}), gradients by {distances[0]:.2g} ({distances[1]:.2g}), a tensor by "
                  f"{worst:.2g} ({torch_worst:.2g})")


def torch_run(theirs, batches, lr, decay):
    f = lambda v: float(np.float32(v))      # torch gets the float32 values of the settings
    optimizer = torch.optim.AdamW(theirs.single.parameters(), f(lr), (f(0.9), f(0.999)), f(ADAM_EPS), f(decay))
    losses = []
    for step in range(STEPS):
        losses.append(theirs.backward(batches[step % len(batches)])[0])
        optimizer.step()
    return np.array(losses)


def trajectory(lib, which):
    """AdamW on four batches, of which two have lengths and one is shorter."""
    name, lr, decay = MODELS[which][0], 1e-3, 0.1
    batches = [Data(which, 100 + i, positions=13 if i == 2 else None, lengths=[LONGER, 5, 12] if i % 2 else None) for i in range(4)]
    single, double = twins(which, 7)
    start = {n: w.clone() for n, w in single.state_dict().items()}
    truth = torch_run(Torch(which, double, O0, F32), batches, lr, decay)
    wanted = without_key_biases(which, tensors(which, double, lambda p: p))
    with torch.no_grad():
        logits = logits_of(double, batches[1])
    right = int((logits.argmax(-1) == batches[1].truth).sum())
    for level, low in CASES:
        single.load_state_dict(start)
        ours = ours_scaled(lib, which, level, low, optimizer=ADAMW, lr=lr, weight_decay=decay, adam_eps=ADAM_EPS)
        ours.put(single)
        steps = [ours.step(batches[step % 4]) for step in range(STEPS)]
        torch_losses = torch_run(Torch(which, single, level, low), batches, lr, decay)
        weights, at = off(without_key_biases(which, ours.weights), wanted)
        torch_weights, _ = off(without_key_biases(which, tensors(which, single, lambda p: p)), wanted)
        losses, torch_losses = (np.abs(x / truth - 1).max() for x in (np.array([s[1] for s in steps]), torch_losses))
        loss, correct, count = ours.evaluate(batches[1])
        evaluation = abs(loss / loss_of(logits, batches[1]).item() - 1)
        text = f"{name} O{level} {NAME[low]}"
        check(all(s[0] == APPLIED for s in steps), f"{text}: outcomes {[s[0] for s in steps]}")
        check(count == int((batches[1].truth != IGNORED).sum()), f"{text}: {count} predictions")
        few, few_losses, times = (1e-4, 1e-4, 0) if low == F32 else bounds(low)
        check(losses <= few_losses + times * torch_losses, f"{text}: a loss is off by {losses:.3g}, torch's by {torch_losses:.3g}")
        check(weights <= few + times * torch_weights, f"{text}: {at} is off by {weights:.3g}, torch's worst by {torch_weights:.3g}")
        check(evaluation <= few_losses + times * torch_losses, f"{text}: the loss of an evaluation is off by {evaluation:.3g}")
        check(abs(correct - right) <= 2 * (low != F32), f"{text}: {correct} answers are right, torch has {right}")
        print(f"{text}: {STEPS} steps, losses off by {losses:.2g} (torch's {torch_losses:.2g}), a weight by {weights:.2g} "
              f"({torch_weights:.2g}) of its tensor's largest; then {correct} of {count} right, torch {right}")


def blocks(lib, which):
    """amp_transformer_block has the bits of the same layers one by one, and starts as theirs do."""
    single, _ = twins(which, 11)
    d = Data(which, 11, lengths=[LONGER, 6, 2])
    for level, low in CASES:
        each, whole = Ours(lib, which, level, low), Ours(lib, which, level, low, whole=1)
        each.put(single)
        whole.put(single)
        text = f"{MODELS[which][0]} O{level} {NAME[low]}"
        check((each.predict(d) == whole.predict(d)).all(), f"{text}: whole blocks give other logits than their layers")
        check(each.step(d) == whole.step(d), f"{text}: whole blocks give another loss")
        check(all((g == whole.gradients[n]).all() for n, g in each.gradients.items()), f"{text}: whole blocks give other gradients")
    first = MODELS[which][1](sd=0.02)
    ours = Ours(lib, which, whole=1).weights
    for n, a in tensors(which, first, lambda p: p).items():
        if ".h." not in n and ".layers." not in n:
            continue
        sd, few = a.std(), 5 / (2 * a.size) ** 0.5      # five times the error of a standard deviation, in each
        check(abs(ours[n].std() - sd) <= 2 * few * sd and abs(ours[n].mean() - a.mean()) <= 10 * sd / a.size ** 0.5,
              f"{MODELS[which][0]}: {n} starts with mean {ours[n].mean():.3g} and sd {ours[n].std():.3g}, theirs {a.mean():.3g}, {sd:.3g}")


def files(lib, which):
    """What we save loads there, and what they save loads here."""
    name = MODELS[which][0]
    d = Data(which, 3)
    single, double = twins(which, 3)
    ours = Ours(lib, which, optimizer=ADAMW, lr=1e-3)
    ours.put(single)
    check(ours.step(d)[0] == APPLIED, f"{name}: a step before saving")
    logits = ours.predict(d)
    other, _ = twins(which, 4)
    other.load_state_dict(ours.state(other), strict=True)
    check(all((np.float32(a) == ours.weights[n]).all() for n, a in tensors(which, other, lambda p: p).items()),
          f"{name}: weights of a file")
    with torch.no_grad():
        error = np.abs(logits_of(other, d).numpy() - logits).max() / np.abs(logits).max()
    check(error <= 8e-6, f"{name}: logits of a saved model are off by {error:.3g}")
    folder = lib.folder.name
    single.config.save_pretrained(folder)
    again, told = type(single).from_pretrained(folder, output_loading_info=True)
    check(not told["missing_keys"] and not told["mismatched_keys"], f"{name}: from_pretrained: {told}")
    check(all(torch.equal(p, q) for p, q in zip(again.parameters(), other.parameters())),
          f"{name}: from_pretrained reads other weights")
    other.save_pretrained(folder)
    third = Ours(lib, which)
    count = lib.shim_text_load(third.t, ours.path("model.safetensors").encode())
    check(count == len(third.weights), f"{name}: {count} tensors of save_pretrained were read")
    check((third.predict(d) == logits).all(), f"{name}: save_pretrained's weights give other logits")


def labels(lib, which):
    """Their own loss, which shifts labels itself; an ignored label of -1."""
    name = MODELS[which][0]
    single, double = twins(which, 5)
    text = torch.from_numpy(Data(which, 5).tokens).long()
    wanted = text.clone()
    wanted[1, 3:9] = -100
    d = Data(which, 5)
    d.labels = torch.cat([wanted[:, 1:], torch.full((BATCH, 1), -100)], 1).numpy().astype(np.int32)
    ours = Ours(lib, which)
    ours.put(single)
    truth = double(text, labels=wanted).loss.item()
    loss = ours.step(d)[1]
    check(abs(loss - truth) <= 1e-6 * truth, f"{name}: loss {loss}, theirs with labels {truth}")
    d = Data(which, 6, ignored=-1, lengths=[LONGER, 4, 11])
    ours = Ours(lib, which, ignored=-1)
    ours.put(single)
    truth = loss_of(logits_of(double, d), d).item()
    loss = ours.step(d)[1]
    check(abs(loss - truth) <= 1e-6 * truth, f"{name}: loss {loss} with label -1 ignored, in float64 {truth}")


def filled(lib, which):
    """31 rows more, of the largest logits by far: no probability, no gradient, no answer, no token."""
    name, fill = MODELS[which][0], 31
    d = Data(which, 8)
    single, double = twins(which, 8)
    ours = Ours(lib, which, fill=fill)
    ours.put(single, lambda p: 20 * torch.randn(fill, p.shape[1]))
    check((ours.predict(d).argmax(-1) >= VOCABULARY).mean() > 0.9, f"{name}: the fill has not the largest logits")
    truth, wanted = Torch(which, double, O0, F32).backward(d)
    loss, correct, _ = ours.evaluate(d)
    check(abs(loss - truth) <= 1e-6 * truth, f"{name}: loss {loss} of a filled vocabulary, in float64 {truth}")
    check(correct == (wanted.argmax(-1) == d.labels).sum(), f"{name}: {correct} right of a filled vocabulary")
    ours.step(d)
    ours.step(d)        # in memory that a step has used
    wanted_g, g = without_key_biases(which, tensors(which, double, lambda p: p.grad)), without_key_biases(which, dict(ours.gradients))
    for n, a in g.items():
        extra = a[wanted_g[n].size:]
        g[n] = a[:wanted_g[n].size]
        check(not extra.any(), f"{name}: {n} has gradients for what only fills up")
    worst, at = off(g, wanted_g)
    check(worst <= 1e-5, f"{name}: the gradient of {at} is off by {worst:.3g} with a filled vocabulary")
    generation(which, ours, single)


def generation(which, ours, single):
    for prompt in ([5], [3, 1, 4, 1, 5], [90, 2, 2, 7, 0, 96, 33, 8, 1, 64]):
        count = T - len(prompt)
        with torch.no_grad():
            text = single.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                   do_sample=False, max_new_tokens=count, pad_token_id=0)[0, len(prompt):].tolist()
        mine = ours.generate(prompt, count)
        check(mine == text and len(text) == count, f"{MODELS[which][0]}: {prompt} goes on with {mine}, theirs {text}")


def generates(lib, which):
    for seed in range(3):
        single, _ = twins(which, 20 + seed)
        ours = Ours(lib, which)
        ours.put(single)
        generation(which, ours, single)


BROKEN = {"GPT-2": "transformer.h.1.mlp.c_fc", "Llama": "model.layers.1.self_attn.v_proj", "tied Llama": "model.layers.0.mlp.up_proj",
          "fused Llama": "model.layers.1.mlp.gate_proj",
          "Mistral": "model.layers.1.self_attn.q_proj", "BERT": "bert.encoder.layer.0.intermediate.dense"}


def first_overflow(model, d, run):
    """The first module of their model whose output is not finite."""
    found = []
    hooks = [module.register_forward_hook(lambda module, args, y, name=name: found.append(name)
             if torch.is_tensor(y) and not torch.isfinite(y).all() else None) for name, module in model.named_modules()]
    with torch.no_grad():
        run(d)
    for hook in hooks:
        hook.remove()
    return found[0] if found else ""


def overflows(lib, which):
    """A layer that passes 65504, and a loss scale that gradients do not bear."""
    name, layer = MODELS[which][0], BROKEN[MODELS[which][0]]
    d = Data(which, 9)
    for level, low in CASES[1:]:
        text = f"{name} O{level} {NAME[low]}"
        single, _ = twins(which, 9)
        with torch.no_grad():
            single.get_submodule(layer).weight.clamp_(-1, 1).mul_(6e4)
        ours = ours_scaled(lib, which, level, low, optimizer=ADAMW, lr=1e-3)
        ours.put(single)
        before = {n: w.copy() for n, w in ours.weights.items()}
        outcome, _, culprit = ours.step(d)
        theirs = Torch(which, single, level, low)
        found = first_overflow(theirs.model, d, theirs.logits)
        if low == F16:
            check(found == layer, f"{text}: in torch {found} overflows first, not {layer}")
            check(outcome == SKIPPED_MODEL and culprit == layer, f"{text}: outcome {outcome}, which blames '{culprit}', not {layer}")
            check(all((w == before[n]).all() for n, w in ours.weights.items()), f"{text}: a skipped step has changed weights")
        else:
            check(outcome == APPLIED and not found, f"{text}: outcome {outcome}, and torch finds '{found}'")
        if low != F16:
            continue
        single, _ = twins(which, 9)
        ours = Ours(lib, which, level, low, optimizer=ADAMW, lr=1e-3, scale=2.0 ** 24)
        ours.put(single)
        before = {n: w.copy() for n, w in ours.weights.items()}
        outcome, _, culprit = ours.step(d)
        theirs = Torch(which, single, level, low)
        theirs.scale = 2.0 ** 24
        theirs.backward(d)
        found = [n for n, p in single.named_parameters() if not torch.isfinite(p.grad).all()]
        check(found, f"{text}: torch's gradients are finite with a loss scale of 2^24")
        check(outcome == SKIPPED_OVERFLOW and culprit in found, f"{text}: outcome {outcome}, which blames '{culprit}', torch {found}")
        check(all((w == before[n]).all() for n, w in ours.weights.items()), f"{text}: a skipped step has changed weights")


def main():
    torch.set_num_threads(1)
    lib = load(sys.argv[1])
    for which, (name, _, more) in enumerate(MODELS):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        is_fused, is_text = more.get("fused"), more["kind"] != BERT
        for part, has in ((passes, True), (trajectory, True), (overflows, True), (files, not is_fused),
                          (blocks, is_text and not is_fused), (labels, is_text), (filled, is_text), (generates, is_text)):
            if has:
                part(lib, which)
    print(f"{check_model.passed} passed, {check_model.failed} failed")
    return 1 if check_model.failed or not check_model.passed else 0


if __name__ == "__main__":
    sys.exit(main())
