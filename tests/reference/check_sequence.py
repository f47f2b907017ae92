"""check_sequence.py LIBRARY - a GPT-2 and a Llama beside Hugging Face's, with random weights that travel as a safetensors file.

LIBRARY is a shared library made of shim_sequence.c and the implementation of amp.h. Truth is torch in float64. In FP32 we may be
as far from it as `BOUND`; in 16 bits twice as far as torch.autocast is, or as the roundings of so many layers."""
import ctypes
import json
import os
import struct
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

try:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
except ImportError:
    print("skipped: no transformers")
    sys.exit(0)

O0, O1, O2 = 0, 1, 2
F32, F16, BF16 = 1, 2, 3
GPT2, LLAMA = 0, 1
BATCH, POSITIONS, VOCABULARY, FEATURES, HEADS, LAYERS, STEPS = 3, 24, 61, 48, 4, 2, 12
LR = 1e-3
BOUND = 2e-5
CASES = [("O0", O0, F32, None), ("O1 f16", O1, F16, torch.float16), ("O1 bf16", O1, BF16, torch.bfloat16), ("O2 bf16", O2, BF16, torch.bfloat16)]
passed = failed = 0


def check(ok, text):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print("failed:", text)


def make(kind):
    torch.manual_seed(5 + kind)
    if kind == GPT2:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=FEATURES, n_layer=LAYERS, n_head=HEADS,
                                           resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1,
                                           attn_implementation="eager"))
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=FEATURES, intermediate_size=100, num_hidden_layers=LAYERS,
                                             num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=POSITIONS,
                                             initializer_range=0.1, tie_word_embeddings=False, attn_implementation="eager"))
    with torch.no_grad():                       # norms and biases other than 1 and 0
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def tensors(model):
    """Our names, with the weights of Conv1D as dense layers have them; a tied head is left out."""
    for name, p in model.named_parameters():
        yield name, p, p.dim() == 2 and any(part in name for part in (".c_attn.", ".c_proj.", ".c_fc."))


def write(model, path):
    header, blob = {}, b""
    for name, p, transposed in tensors(model):
        a = p.detach().float().numpy()
        a = np.ascontiguousarray(a.T if transposed else a)
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [len(blob), len(blob) + a.nbytes]}
        blob += a.tobytes()
    text = json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + blob)
    return len(header)


class Ours:
    def __init__(self, lib, kind, level, low, scale):
        self.lib = lib
        lib.shim_sequence_new.restype = ctypes.c_void_p
        lib.shim_sequence_new.argtypes = [ctypes.c_int] * 11 + [ctypes.c_float] * 2
        self.w = ctypes.c_void_p(lib.shim_sequence_new(kind, BATCH, POSITIONS, VOCABULARY, FEATURES, HEADS, 2 if kind else 0,
                                                       100 if kind else 0, LAYERS, level, 0 if level == O0 else low, LR, scale))
        assert self.w

    def text(self, words, following, lengths):
        held = lengths.ctypes.data_as(ctypes.c_void_p) if lengths is not None else None
        return [self.w, words.ctypes.data_as(ctypes.c_void_p)] + ([following.ctypes.data_as(ctypes.c_void_p)] if following is not None else []) + [
            words.shape[0], words.shape[1], held]

    def logits(self, words, lengths):
        out = np.zeros(words.shape + (VOCABULARY,), np.float32)
        assert self.lib.shim_sequence_logits(*self.text(words, None, lengths), out.ctypes.data_as(ctypes.c_void_p)) == 0
        return out

    def loss(self, what, *args):
        loss = ctypes.c_float()
        r = getattr(self.lib, "shim_sequence_" + what)(*self.text(*args), ctypes.byref(loss))
        assert r == 0, r
        return loss.value

    def param(self, name, weights):
        count = self.lib.shim_sequence_param(self.w, name.encode(), weights, None)
        assert count, name
        out = np.zeros(count, np.float32)
        assert self.lib.shim_sequence_param(self.w, name.encode(), weights, out.ctypes.data_as(ctypes.c_void_p)) == count
        return out


def theirs(model, words, following, lengths, autocast, train=True):
    """Logits and loss; positions beyond lengths have label -100 and are masked."""
    words, labels = torch.from_numpy(words).long(), torch.from_numpy(following).long()
    mask = torch.ones_like(words)
    if lengths is not None:
        mask = (torch.arange(words.shape[1])[None] < torch.from_numpy(lengths)[:, None]).long()
        labels = labels.masked_fill(mask == 0, -100)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        logits = model(input_ids=words, attention_mask=mask).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100)
    if train:
        model.zero_grad()
        loss.backward()
    return logits.detach().double().numpy(), loss.item()


def distance(a, b):
    top = np.sqrt(sum(np.sum((np.asarray(x, np.float64).ravel() - np.asarray(y, np.float64).ravel()) ** 2) for x, y in zip(a, b)))
    return top / np.sqrt(sum(np.sum(np.asarray(y, np.float64) ** 2) for y in b))


def shaped(p, transposed):
    p = p.detach().double().numpy()
    return (p.T if transposed else p).ravel().copy()


def texts(rng, step):
    t = (POSITIONS, 17, POSITIONS)[step % 3]
    words = rng.integers(0, VOCABULARY, (BATCH, t)).astype(np.int32)
    following = rng.integers(0, VOCABULARY, (BATCH, t)).astype(np.int32)
    lengths = rng.integers(1, t + 1, BATCH).astype(np.int32) if step % 3 == 2 else None
    return words, following, lengths


def one_model(lib, kind, path):
    name = ("GPT-2", "Llama")[kind]
    model, double = make(kind), make(kind).double()
    count = write(model, path)
    for text, level, low, autocast in CASES:
        ours = Ours(lib, kind, level, low, 1024.0 if low == F16 else 1.0)
        read = lib.shim_sequence_load(ours.w, path.encode())
        check(read == count, f"{name} {text}: {read} of {count} tensors read")
        rounding = {F32: 0.0, F16: 2.0 ** -11, BF16: 2.0 ** -8}[low] * 6 * LAYERS
        rng = np.random.default_rng(3)
        for step in range(3):
            words, following, lengths = texts(rng, step)
            want, loss64 = theirs(double, words, following, lengths, None)
            g64 = [shaped(p.grad, t) for _, p, t in tensors(double)]
            near, torch_loss = theirs(model, words, following, lengths, autocast)
            g_torch = [shaped(p.grad, t) for _, p, t in tensors(model)]
            keep = np.ones(words.shape, bool) if lengths is None else np.arange(words.shape[1])[None] < lengths[:, None]
            got = ours.logits(words, lengths)
            loss = ours.loss("pass", words, following, lengths)
            g = [ours.param(n, 0) for n, _, _ in tensors(model)]
            off, torch_off = distance([got[keep]], [want[keep]]), distance([near[keep]], [want[keep]])
            g_off, g_torch_off = distance(g, g64), distance(g_torch, g64)
            bound = lambda t: BOUND if low == F32 else rounding + 2 * t
            check(off <= bound(torch_off), f"{name} {text}, text {step}: logits off by {off:.3g}, torch's by {torch_off:.3g}")
            check(abs(loss - loss64) <= bound(abs(torch_loss - loss64) / loss64) * loss64, f"{name} {text}, text {step}: loss {loss}, {loss64}")
            check(g_off <= bound(g_torch_off), f"{name} {text}, text {step}: gradients off by {g_off:.3g}, torch's by {g_torch_off:.3g}")
            if step == 2:
                print(f"{name} {text}: logits off by {off:.2g} of their norm, torch's by {torch_off:.2g}; gradients by {g_off:.2g} and {g_torch_off:.2g}")
        lib.shim_sequence_free(ours.w)
        trained(lib, kind, name, path, text, level, low, autocast, rounding)


def trained(lib, kind, name, path, text, level, low, autocast, rounding):
    """Steps of AdamW: how far the weights are from the truth, as a part of the way that they have travelled."""
    ways, losses = [], []
    for dtype in (torch.float64, torch.float32):
        model = make(kind).to(dtype)
        start = [shaped(p, t) for _, p, t in tensors(model)]
        optimizer = torch.optim.AdamW(model.parameters(), float(np.float32(LR)), weight_decay=0.0)
        rng = np.random.default_rng(4)
        losses.append([])
        for step in range(STEPS):
            losses[-1].append(theirs(model, *texts(rng, step), autocast if dtype == torch.float32 else None)[1])
            optimizer.step()
        ways.append([shaped(p, t) - s for (_, p, t), s in zip(tensors(model), start)])
    ours = Ours(lib, kind, level, low, 1024.0 if low == F16 else 1.0)
    lib.shim_sequence_load(ours.w, path.encode())
    names = [n for n, _, _ in tensors(model)]
    start = [ours.param(n, 1).astype(np.float64) for n in names]
    rng = np.random.default_rng(4)
    mine = [ours.loss("step", *texts(rng, step)) for step in range(STEPS)]
    way = [ours.param(n, 1) - s for n, s in zip(names, start)]
    off, torch_off = distance(way, ways[0]), distance(ways[1], ways[0])
    far, torch_far = (max(abs(a - b) / b for a, b in zip(l, losses[0])) for l in (mine, losses[1]))
    # an update is a gradient over its own size: where that is near 0 a rounding turns it around, for us and for torch
    check(off <= (2e-3 if low == F32 else rounding) + 3 * torch_off, f"{name} {text}: the weights are off by {off:.3g} of their way, torch's by {torch_off:.3g}")
    check(far <= (BOUND if low == F32 else rounding) + 3 * torch_far, f"{name} {text}: a loss is off by {far:.3g}, torch's by {torch_far:.3g}")
    print(f"{name} {text}: {STEPS} steps, weights off by {off:.2g} of their way, torch's by {torch_off:.2g}; losses by {far:.2g} and {torch_far:.2g}")
    lib.shim_sequence_free(ours.w)


def main():
    torch.set_num_threads(1)
    lib = ctypes.CDLL(sys.argv[1])
    with tempfile.TemporaryDirectory() as d:
        for kind in (GPT2, LLAMA):
            one_model(lib, kind, os.path.join(d, "weights.safetensors"))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
