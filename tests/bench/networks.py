"""The networks of networks.h in PyTorch, for bench.py and bench_cuda.py."""
import os, re
import torch
from torch import nn

TABLE = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "networks.h")).read()
# name -> (side, classes, layers)
NETWORKS = {name: (int(side), int(classes), "".join(re.findall(r'"([^"]*)"', layers))) for name, side, classes, layers in
            re.findall(r'\{ "(\w+)", (\d+), (\d+), ((?:\s*"[^"]*")+) \}', TABLE)}


def lenet():
    return nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
                         nn.Linear(84, 10))


def dense(*widths):
    layers = []
    for i, o in zip(widths, widths[1:]): layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def normed(i, o, kernel, stride, groups=1):
    return [nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups), nn.BatchNorm2d(o)]


class Residual(nn.Module):
    def __init__(self, i, o, stride, narrow):
        super().__init__()
        a = o // 4 if narrow else o
        inside = normed(i, a, 1, 1) + [nn.ReLU()] if narrow else []
        inside += normed(a if narrow else i, a, 3, stride) + [nn.ReLU()] + normed(a, o, 1 if narrow else 3, 1)
        self.inside = nn.Sequential(*inside)
        self.past = nn.Sequential(*(normed(i, o, 1, stride) if i != o or stride != 1 else []))
        self.relu = nn.ReLU()
    def forward(self, x): return self.relu(self.past(x) + self.inside(x))


def network(name, divide=1):
    _, classes, table = NETWORKS[name]
    layers, width = [], 3
    for kind, o, kernel, stride in re.findall(r"(\w) (\d+) (\d+) (\d+)", table):
        o, kernel, stride = int(o) // divide, int(kernel), int(stride)
        if kind == "p": layers += [nn.MaxPool2d(kernel, stride, (kernel - 1) // 2)]
        elif kind in "cd": layers += normed(width, o, kernel, stride, width if kind == "d" else 1) + [nn.ReLU()]
        else: layers += [Residual(width, o, stride, kind == "b")]
        if kind != "p": width = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class Block(nn.Module):
    def __init__(self, C, H):
        super().__init__()
        self.heads = (H, C // H)
        self.norm1, self.qkv, self.project = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm2, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
    def forward(self, x):
        q, k, v = (a.unflatten(2, self.heads).transpose(1, 2) for a in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The smallest one, if nothing is said; from tokens [B,T] to logits [B*T,V]."""
    def __init__(self, length, C=768, H=12, blocks=12, V=50304):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(length, C)
        self.blocks, self.norm = nn.Sequential(*(Block(C, H) for _ in range(blocks))), nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1: nn.init.uniform_(p, -0.035, 0.035)
    def forward(self, x):
        x = self.blocks(self.tokens(x) + self.positions.weight)
        return nn.functional.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
