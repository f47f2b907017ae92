"""mutants.py [1/N] [WORD...] - plants one small fault at a time in a copy of amp.h and sees whether a test fails.

Each row of the table: the tests most likely to see it ("openmp": that one alone, with -fopenmp), a piece of amp.h that
stands there exactly once (a row of which that is not true fails the run, whichever rows were chosen, so the table cannot
rot), and what replaces it. The fault's room is the >>impl- tag above it. The likely tests run first, in a build without SIMD if
the fault shows there, which takes seconds; then they and all others with it. The first failure, crash or hang ends it. Fails if fewer than 95 % are seen, or if one does not compile. With words, only rows
whose room, tests or pattern contain one of them; with 1/N, only every Nth row. Where the processor has no AVX-512, rows in
code for it are left out. CC: the compiler, default gcc; JOBS: at
a time, default 2. Needs only Python itself.
tests/emu/mutants.py does the same to amp_cuda.cuh, with its own table.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

MINIMUM = 95.0

TABLE = [
    # --- base
    ("ops alloc", "return b == 0 || a <= SIZE_MAX / b;", "return b == 0 || a <= SIZE_MAX;"),
    ("half", "i++, job.desc.offset += cols)", "i++)"),
    ("half", "d < s + ((rows - 1) * src_ld + cols) * from", "d < s + cols * from"),
    ("gemm", "return accumulate < 0 || (accumulate & ~AMP_ACCUMULATE_INPUT) != 0;", "return accumulate != 0;"),
    ("alloc", "if (size == 0) size = 1;", "if (size == 0) return NULL;"),
    ("alloc", "if (a && a->free) (a->free)(p, a->user_data);", "if (a && !a->free) (a->free)(p, a->user_data);"),
    ("hostile", "if (!logger || !logger->log) return code;", "if (!logger) return code;"),
    ("hostile", "if ((unsigned char)*p < 0x20) *p = ' ';", "if ((unsigned char)*p < 0x10) *p = ' ';"),
    ("optim", "return ampi_is_zero(p) ? value : ampi_is_off(p) ? 0.0f : *p;", "return ampi_is_zero(p) ? value : *p;"),
    ("hostile", "AMPI_REFUSE_OP(!ampi_is_finite(&weight),", "AMPI_REFUSE_OP(0,"),
    ("gemm ops", "if (err != 0.0 && !(u & 1u)", "if (err != 0.0 && (u & 1u)"),
    ("gemm ops", "((err > 0.0) == (sum > 0.0)) ? u + 1u : u - 1u", "((err > 0.0) == (sum > 0.0)) ? u - 1u : u + 1u"),
    ("gemm ops", "if ((u & 0x1fffffffu) != 0x10000000u", "if ((u & 0x1fffffffu) != 0x1fffffffu"),
    ("ops", "ampi_philox(seed, index >> 2, r);", "ampi_philox(seed, index >> 1, r);"),
    ("ops", "(float)(amp_random_bits(seed, index) >> 8)", "(float)(amp_random_bits(seed, index) >> 7)"),
    ("scaler optim", "y.from < high && y.to > low; k++", "y.from < high && y.from > low; k++"),
    ("scaler optim", "high = y.to > high ? y.to : high;", "high = y.to;"),
    ("scaler optim", "low = y.from < low ? y.from : low;", "low = y.from;"),
    # --- cpu
    ("half", "if (!ampi_isa_available(isa)) return AMP_ERR_UNSUPPORTED;", ""),
    ("half", "neon\\0avx2\\0avx512", "neon\\0avx\\0avx512"),
    # --- half
    ("half", "carry = _mm512_set1_epi32(0x7ffe);", "carry = _mm512_set1_epi32(0x7fff);"),
    ("half", "if (limit == 0x7f800000u) return _mm512_fpclass_ps_mask(x, 0x81) != 0;", "if (limit == 0x7f800000u) return 0;"),
    ("half", "(u & kept) | 0x7fc00000u : u);", "(u & kept) | 0x7f800000u : u);"),
    ("half nan", "x[l] = ampi_float((u & 0x7fffffffu) > 0x7f800000u ?", "x[l] = ampi_float(u > 0x7f800000u ?"),
    ("half", "0xf000d000b0009,\n        0x7000500030001",
     "0xf000d000b0009,\n        0x6000500030001"),
    ("half nan", "if (!AMPI_K(above)(x, 0x7f800000u)) return x;", "return x;"),
    ("half", "if (clean || to == AMP_BF16 || from == AMP_BF16)", "if (clean || to == AMP_BF16)"),
    ("nan", "if (clean || to == AMP_BF16 || from", "if (to == AMP_BF16 || from"),
    ("half", "if (n == whole) return;", "if (n <= whole + 1) return;"),
    ("half", "random ? bits + skip : NULL", "random ? bits : NULL"),
    ("half", "job->desc.offset + first + i;", "job->desc.offset + i;"),
    ("half", "return t == AMP_F16 ? 0x7c00u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;", "return t == AMP_F32 ? 0x7f800000u : 0x7c00u;"),
    ("half", "(job->from == 8 || job->desc.rounding == AMP_ROUND_STOCHASTIC)", "job->desc.rounding == AMP_ROUND_STOCHASTIC"),
    ("half", "k = 13u + (below < 12u ? below : 12u)", "k = 13u + (below < 11u ? below : 11u)"),
    ("half", "nearest = (1u << (k - 1u)) - 1u + ((sig >> k) & 1u)", "nearest = (1u << (k - 1u))"),
    ("half", "h = h > 0x7c00u ? 0x7c00u : h;", ""),
    ("half", "h = mag > 0x7f800000u ? 0x7e00u |", "h = mag > 0x7f800000u ? 0x7c00u |"),
    ("half", "u + 0x7fffu + (u >> 16 & 1u)", "u + 0x8000u"),
    ("half", "quiet = u | 0x400000u;\n    return (uint16_t)(((u", "quiet = u;\n    return (uint16_t)(((u"),
    ("half", "u = mag < 0x400u ? tiny - (24u << 23) : u;", "u = mag < 0x3ffu ? tiny - (24u << 23) : u;"),
    ("half", "u = mag > 0x7c00u ? u | 0x400000u : u;", ""),
    ("half", "u = mag < 0x800000u ? tiny - ((uint64_t)149u << 52) : u;", ""),
    ("half", "- 1u + (v >> cut & 1u));", "- 1u);"),
    ("half", "v = sig >> shift | ((sig & (((uint64_t)1u << shift) - 1u)) != 0u);", "v = sig >> shift;"),
    ("half", "(uint64_t)~*random << (cut - 32u)", "((uint64_t)~*random + 1u) << (cut - 32u)"),
    ("half", "return (magnitude > inf) - (magnitude < inf);", "return (magnitude >= inf) - (magnitude < inf);"),
    ("half", "(size_t)(backwards ? blocks - 1 - i : i)", "(size_t)i"),
    ("half hostile", "s < d + ((rows - 1) * dst_ld + cols) * to,", "s < d + cols,"),
    # --- gemm
    ("openmp", "{ __VA_ARGS__; } } while (0)\n  #define AMPI_PARALLEL_ORDERED",
     "{ AMPI_PRAGMA(omp parallel for if (condition)) __VA_ARGS__; } } while (0)\n  #define AMPI_PARALLEL_ORDERED"),
    ("gemm hostile", "AMPI_REFUSE_CALL(p->ld < p->cols,", "AMPI_REFUSE_CALL(p->ld + 1 < p->cols,"),
    ("gemm", "if (s->ldb == 0) s->ldb = tb ? s->k : s->n;", "if (s->ldb == 0) s->ldb = s->n;"),
    ("gemm", "if (s->batch == 0) s->batch = 1;", ""),
    ("gemm hostile", "AMPI_REFUSE_CALL(ampi_series_meets_itself(c, s->c_stride, s->batch),", "AMPI_REFUSE_CALL(ampi_series_meets_itself(c, s->c_stride, 2),"),
    ("hostile", "d + t * pitch < width[0];", "d + t * pitch <= width[0];"),
    ("hostile", "if (d + t * pitch <= -width[1]) t +=", "if (d + t * pitch < -width[1]) t +="),
    ("hostile", "if (pitch != 1 && pitch != step) return 0;", ""),
    ("hostile", "w->data == o->data\n                            && ampi_dtype(w->dtype) == ampi_dtype(o->dtype);", "w->data == o->data;"),
    ("openmp", "own.workspace_size = step;", ";"),
    ("hostile", "i < count && i * stride < reach; i++", "i < count && i * stride + 1 < reach; i++"),
    ("hostile", "const size_t p_count = p_stride ? count : 1", "const size_t p_count = p_stride ? count - 1 : 1"),
    ("gemm", "t->b, AMPI_NULL, z->b)", "t->b, AMPI_UNUSED, z->b)"),
    ("conv", "room = padded - (int64_t)dilation * (kernel - 1) - 1;", "room = padded - (int64_t)dilation * (kernel - 1);"),
    ("conv", "AMPI_REFUSE_CALL(s->channels % s->groups != 0 || s->out_channels % s->groups != 0,",
     "AMPI_REFUSE_CALL(s->channels % s->groups != 0,"),
    # --- kernels of products and convolutions, one text for all instruction sets
    ("gemm", "left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;",
     "left >= 8 ? 8 : left >= 6 ? 6 : left >= 3 ? 4 : left >= 2 ? 2 : 1;"),
    ("gemm", "AMPI_K(transpose)(dst + p * ldd, ldd, block, sizeof block[0], AMP_F32);", ""),
    ("gemm", "for (p = k; p < 2 * pairs; p++) AMPI_K(clear)(x + p * ld, width);", ""),
    ("gemm", "u.k = kc; u.first = k0 == 0;", "u.k = kc; u.first = 1;"),
    ("gemm", "const int kept = s->k > b->kc;", "const int kept = 0;"),
    ("gemm conv", "const int in_place = a->along_k && a->dtype == AMP_F32 && !a->is_image && !a->area;",
     "const int in_place = a->along_k && a->dtype == AMP_F32 && !a->is_image;"),
    ("gemm", "(u.k_step == 0 ? u.k + AMPI_PAD : u.row_step)", "(u.k_step == 0 ? u.k : u.row_step)"),
    ("gemm", "form != AMPI_FP32 || m <= AMPI_FEW_ROWS", "form != AMPI_FP32"),
    ("gemm", "to + i * (u->k + AMPI_PAD) + p * here", "to + i * (u->k + AMPI_PAD) + p * 4"),
    ("gemm nan", "u.quiet = in_c && k0 + kc == s->k;", "u.quiet = 0;"),
    ("gemm", "&& !s->b.is_image && n % AMPI_LANES == 0", "&& !s->b.is_image"),
    ("gemm", "c->alpha == 1.0f && c->beta == 0.0f", "c->beta == 0.0f"),
    ("gemm", "c->beta == 0.0f && !c->bias && c->column == 1", "c->beta == 0.0f && c->column == 1"),
    ("gemm", "x = AMPI_K(mul)(alpha, AMPI_K(load)(sums + from + at));", "x = AMPI_K(load)(sums + from + at);"),
    ("gemm", "AMPI_K(add)(AMPI_K(mul)(alpha, AMPI_K(load)(sums + from + at)), bias);", "AMPI_K(add)(AMPI_K(load)(sums + from + at), bias);"),
    ("gemm", "plain = step == 1 && !adds && (!c->bias || bias_of_rows);", "plain = step == 1 && !adds;"),
    ("gemm", "store_any)(row + at * size, t, AMPI_K(quiet)(x, 0), n - at);", "store_any)(row + at * size, t, x, n - at);"),
    ("gemm", "const int adds = c->beta != 0.0f,", "const int adds = c->beta > 0.0f,"),
    ("gemm", "const int rows_of_b = few && !s->b.along_k;", "const int rows_of_b = few;"),
    ("gemm", "                    if (q < here)\n", ""),
    ("gemm", "x = AMPI_K(quiet)(AMPI_K(add)(x, bias), 0);", "x = AMPI_K(add)(x, bias);"),
    ("conv gemm", "AMPI_V16 bias = AMPI_K(set1)(-0.0f), x;", "AMPI_V16 bias = AMPI_K(set1)(0.0f), x;"),
    ("gemm", "ampi_at(c->bias, c->bias_dtype, j + from + at)", "ampi_at(c->bias, c->bias_dtype, from + at)"),
    ("conv", "if (!in_place || windows) panels.part = panels.used", "if (0) panels.part = panels.used"),
    ("gemm", "_mm256_permute2f128_ps(r[i], r[i + 4], 0x31)", "_mm256_permute2f128_ps(r[i], r[i + 4], 0x20)"),
    ("gemm", "s.exact |= s.a.dtype == AMP_F16 && s.b.dtype == AMP_F16;",
     "s.exact |= s.a.dtype == AMP_F16 || s.b.dtype == AMP_F16;"),
    ("gemm", "((s->k > p->kc ? p->tall : p->mc) + AMPI_LANES) * (p->nc + AMPI_PAD)", "AMPI_LANES * (p->nc + AMPI_PAD)"),
    ("conv", "if (y < 0 || y >= g->h.size || inside == 0) {", "if (y < 0 || y > g->h.size || inside == 0) {"),
    ("conv", "(size_t)((distance + step - 1) / step), most);", "(size_t)(distance / step), most);"),
    ("conv", "ampi_max_size(ampi_steps(width - x, step, count), left)", "ampi_max_size(ampi_steps(width + 1 - x, step, count), left)"),
    ("conv", "ampi_max_size(end, s.padded > before ? s.padded - before : 0)", "s.padded > before ? s.padded - before : 0"),
    ("conv", "? (size_t)(-(int64_t)s.low / step) : 0;", "? (size_t)(-(int64_t)s.low) : 0;"),
    ("conv", "(plane + y % sh) * g->w.phases + x % sw) * step", "(plane + y % sh) * g->w.phases) * step"),
    ("conv", "y / sh * g->w.padded + x / sw);", "y * g->w.padded + x / sw);"),
    ("conv", "        row = 0;\n        plane += g->image;\n", "        row = 0;\n"),
    ("conv", "plane < g->elements ? (int64_t)(row", "1 ? (int64_t)(row"),
    ("conv", "((ampi_div_up(places, AMPI_LANES) + 1) | 1) * AMPI_LANES", "places"),
    ("conv", "(g->h.count - pixel / g->w.count, (count - i) / wide);", "(g->h.count, (count - i) / wide);"),
    ("conv", "for (; i < count; h = 0, from += v->output) {", "for (; i < count; h = 0, from += v->ld) {"),
    ("conv", "here - (k0 + p) % ampi_min_size(b->image.area, here));", "here + 1);"),
    ("conv", "while (p->x >= c->cols || p->row >= c->used) {", "while (p->x >= c->cols || p->row >= c->used + 40) {"),
    ("conv", "    if (part == g->pixels) return;\n", ""),
    ("conv", "c->used = (g->h.count - 1) * g->w.padded + g->w.count;", "c->used = g->h.count * g->w.count;"),
    ("conv", "    if (s->b.is_image) AMPI_K(clear)(sums, (kept ?", "    if (0) AMPI_K(clear)(sums, (kept ?"),
    ("conv", "(ampi_round_up(results, AMPI_LANES) - zeros) * AMPI_LANES);", "(results - zeros) * AMPI_LANES);"),
    ("ops", "if (n - i < AMPI_LANES) tile = (const float*)memcpy(last", "if (0) tile = (const float*)memcpy(last"),
    ("conv", "const float* x = padded + y * (size_t)g->h.step * d.pitch;", "const float* x = padded + y * d.pitch;"),
    ("conv", "acc[i] = first ? AMPI_K(zero)() : AMPI_K(load)(sums + AMPI_LANES * i);", "acc[i] = AMPI_K(zero)();"),
    ("conv", "if (dw && n + 1 < image + images) continue;", ""),
    ("conv", "i < rows ? AMPI_K(load_any)(from + i * step", "i + 1 < rows ? AMPI_K(load_any)(from + i * step"),
    ("conv", "        AMPI_K(clear)(padded + end, d->pitch - end);\n", ""),
    ("conv", "if (p.count > 1) p.next = (int)period;", ""),
    ("conv", "p.step = -(int)((int64_t)p.next * dilation / stride);", "p.step = -1;"),
    ("conv", "if (zero && !run && !ampi_adds_input(t->accumulate))", "if (zero && !run)"),
    ("conv", "else if (run) ampi_convolution_run(&v, exec);", "else ampi_convolution_run(&v, exec);"),
    ("conv", "h * v->next_h + w * v->next_w);", "h * v->kernel_w + w * v->next_w);"),
    ("conv", "dst[i + l] = step <= 4 ? floats[l * step] :", "dst[i + l] = step <= 4 ? floats[l] :"),
    ("conv", "known = p >= g->w.count && pixel >= g->w.count ?", "known = p >= g->w.count ?"),
    ("conv", "known = p >= g->w.count && pixel >= g->w.count ?", "known = pixel >= g->w.count ?"),
    ("conv", "d->first + i * step * high);", "d->first + i * high);"),
    ("conv", "d.known = g->h.step == 1 && g->h.next == 1 ?", "d.known = g->h.step == 1 ?"),
    ("conv", "d.known = g->h.step == 1 && g->h.next == 1 ?", "d.known = g->h.next == 1 ?"),
    ("conv", "to[x * high + e + i] = rows[i * ld + x];", "to[x * high + e + i] = rows[i * ld];"),
    ("conv", "y + (int64_t)((e + i) / g->channels) * g->h.next, &row);", "y + (int64_t)((e + i) / g->channels), &row);"),
    ("conv", "i / g->channels % g->h.kernel * g->w.kernel + i", "i / g->channels % g->h.kernel + i"),
    ("conv", "c->part = c->used = channels * g->h.kernel;", "c->part = c->used = channels * g->w.kernel;"),
    ("conv", "&& (g->w.next == 1 || g->w.kernel == 1);", ";"),
    ("conv", "planes + j + (windows ? j0 + jn : 0)", "planes + j"),
    ("conv", "p->windows.floats <= 2 * p->packed ?", "1 ?"),
    ("conv", "if (p->row >= c->part) p->row = 0;", ""),
    ("conv", "p.row / c->pitch * c->next_row + p.x", "p.row / c->pitch * c->cols + p.x"),
    ("conv", "const int plain = b->is_image && ampi_side_is_plain(&g->h)", "const int plain = b->is_image"),
    ("conv", "ampi_min_size(column + n - p.column, c->cols - p.x);", "column + n - p.column;"),
    ("conv", "group * v->bias_group", "0 * v->bias_group"),
    ("conv", "s->first == 0 && s->count == (size_t)s->size;", "s->first == 0;"),
    ("conv", "    v->a_group = rows;\n", ""),
    ("gemm", "(const char*)x + (i * ld + j) * size, t, width - j",
     "(const char*)x + (i * width + j) * size, t, width - j"),
    ("conv", "i += whole) {", "i += whole + 1) {"),
    ("openmp", "return n / shares * share + (share < n % shares ? share : n % shares);", "return n / shares * share;"),
    ("openmp", "ampi_share_run(g, &s, &p, (size_t)i, memory + (size_t)i * p.floats);",
     "ampi_share_run(g, &s, &p, (size_t)i, memory);"),
    # --- math
    ("scaler", "if (!s->recorded && s->state.consecutive_skips == 0)", "if (!s->recorded)"),
    ("ops", "ampi_bits(ampi_exp_inside(hw, x)) & ~ampi_mask(below < 0xff800000u - least)",
     "ampi_bits(ampi_exp_inside(hw, x))"),
    ("ops", "ampi_fma(hw, n, 1.90465432e-9f, ampi_fma(hw, n, -0.693147182f, x))", "ampi_fma(hw, n, -0.693147182f, x)"),
    ("ops", "float e = ampi_exp(hw, -ampi_abs(x));", "float e = ampi_exp(hw, -x);"),
    ("ops", "w = ampi_fma(hw, t, ampi_fma(hw, -t, a, ampi_fma(hw, -3.40625f, t, 1.0f)), t - 0.109375f);", "w = t - 0.109375f;"),
    ("ops", "p = ampi_fma(hw, p, w, 4.02952099f);", "p = ampi_fma(hw, p, w, 4.02951f);"),
    ("ops", "return ((q + 1) & 2) ? -c : c;", "return (q & 2) ? -c : c;"),
    ("ops", "ampi_select(ampi_mask(from <= 0x7f800000u - 0x3f200000u), large, p)", "large"),
    # --- nn
    ("ops", "AMPI_REFUSE_OP(n > SIZE_MAX / 16,", "AMPI_REFUSE_OP(0,"),
    ("ops", "ampi_share(count, AMPI_PARTS, (size_t)part)", "count / AMPI_PARTS * (size_t)part"),
    ("ops", "if (add) ampi_each(AMPI_ADD,", "if (0) ampi_each(AMPI_ADD,"),
    ("ops hostile", "s->pad_h < 0 || s->pad_w < 0 || s->pad_h > s->kernel_h / 2 || s->pad_w > s->kernel_w / 2",
     "s->pad_h < 0 || s->pad_w < 0 || s->pad_h > s->kernel_h || s->pad_w > s->kernel_w"),
    ("ops", "p->oh = (int)(oh / p->sh) + 1;", "p->oh = (int)((oh + p->sh - 1) / p->sh) + 1;"),
    ("ops", "s.last = (int)(start + kernel < size ? start + kernel : size);\n    return s;\n}\n/* The windows o in [0, out) that",
     "s.last = (int)(start + kernel < size ? start + kernel : size - 1);\n    return s;\n}\n/* The windows o in [0, out) that"),
    ("ops", "if (!p->exclude_pad) return (float)((double)p->kh * (double)p->kw);", ""),
    ("ops", "1.0 / sqrt(g->dot[c] / values + (double)f->p.eps)", "1.0 / sqrt(g->dot[c] / values)"),
    ("ops", "(float)(g->dot[c] / (values - 1.0))", "(float)(g->dot[c] / values)"),
    ("ops", "ampi_fma(AMPI_FMA_NATIVE, momentum, batch_var, old * var[c])",
     "ampi_fma(AMPI_FMA_NATIVE, momentum, var[c], old * batch_var)"),
    ("ops", "return ((x > y) | nan) ? x : y;", "return x > y ? x : y;"),
    ("ops", "at[i + l] = key > best[i + l] ?", "at[i + l] = key >= best[i + l] ?"),
    ("ops", "place = third > best ? 2u : place;", "place = third >= best ? 2u : place;"),
    ("ops", "task == AMPI_POOL_SUM ? in[l] : ~0u;", "in == NULL ? 0u : ~0u;"),
    ("ops", "(0.0f + a + c + (b + d)) / 4.0f", "(0.0f + a + b + (c + d)) / 4.0f"),
    ("ops", "(0.0f + a + b + c + d) / 4.0f", "(0.0f + a + c + (b + d)) / 4.0f"),
    ("ops", "ampi_pool_larger(d, ampi_pool_larger(c,", "ampi_pool_larger(c, ampi_pool_larger(d,"),
    ("ops", "ampi_mask(at[i + l] == place + 1)", "ampi_mask(at[i + l] != place)"),
    ("ops", "p->ph == 0 && p->pw == 0 && p->h % 2 == 0", "p->ph == 0 && p->pw == 0"),
    ("ops", "p->kh == 2 && p->kw == 2 && p->sh == 2 && p->sw == 2", "p->kh == 2 && p->kw == 2"),
    ("ops", "n = ampi_min_size(end - i, AMPI_PART / 4 / ow * ow);", "n = ampi_min_size(end - i, AMPI_PART / 4);"),
    ("ops", "(key < (int32_t)nan ? key : (int32_t)nan) + 0x808081;", "key + 0x808081;"),
    ("ops", "(key < (int32_t)nan ? key : (int32_t)nan) + 0x808081;", "key < (int32_t)nan ? key : (int32_t)nan;"),
    ("ops", "const int64_t c0 = last < 0 ? -last : 0,", "const int64_t c0 = last < 0 ? 1 - last : 0,"),
    ("ops", "task >= AMPI_POOL_GIVE && !q->columns ? c0 + c1 - 1 - c : c", "c"),
    ("ops", "ampi_min_int(o.last, base + ((q->y.c0 - base) / most + 1) * most)", "ampi_min_int(o.last, q->y.c0 + most)"),
    ("ops", "if (q->y.c0 == o.first && q->y.c1 == o.last) q->y.r1", "q->y.r1"),
    ("ops", "AMPI_POOL_BAND - d.c0 % AMPI_POOL_BAND) + d.c0", "AMPI_POOL_BAND) + d.c0"),
    ("ops", "stay = d.r1 - d.r0 - done;", "stay = 0;"),
    ("ops", "if (tall) q->y.r0 = span.first;", ";"),
    ("ops", "(int)(q->columns ? t % down : t / across) * rows + r0", "(int)(t % down) * rows + r0"),
    ("ops", "(task == AMPI_POOL_GIVE || r0 == span.first)) memset(q->sums", "task == AMPI_POOL_GIVE) memset(q->sums"),
    ("ops", "g->dot[c] -= off * off / (1.0 / values);", ""),
    ("ops", "if (ampi_bits64(g->dot[c]) - 0x8000000000000001u < AMPI_INF64) g->dot[c] = 0.0;", ""),
    ("ops", "for (size_t l = 0; l < width; l++) sums[l]", "for (size_t l = 0; l < width / 2; l++) sums[l]"),
    ("ops", "room + (1 + (size_t)(i / rows) % places) * width", "room + (size_t)(i / rows) % places * width"),
    ("ops", "exec->workspace && exec->workspace_size >= bytes;", "exec->workspace;"),
    ("ops", "skip = (size_t)((offset + start) & 3u);", "skip = (size_t)(start & 3u);"),
    ("ops", "bits + skip, p, 1.0f / (1.0f - p),", "bits + skip, p, 1.0f,"),
    ("ops", "AMPI_ARG(x, xt, AMPI_OUT | none, rows * d)", "AMPI_ARG(x, xt, AMPI_OUT | AMPI_NULL, rows * d)"),
    ("ops", "training = ampi_bn_trains(s, training);", ""),
    ("ops", "if (!ampi_is_finite(&next_mean) || !ampi_is_finite(&next_var)) return;", ""),
    ("ops", "terms == AMPI_SQUARES_LESS ? t.d : x;", "x;"),
    ("ops", "terms == AMPI_PRODUCTS || terms == AMPI_DOT ? y : t.d;", "terms == AMPI_PRODUCTS ? y : t.d;"),
    ("ops", "ampi_min_size(past - row, ampi_rows_of_tile(f->d));", "ampi_rows_of_tile(f->d);"),
    ("ops", "if (n == 1) ampi_bn_read(f, g, AMPI_ARG_X, 0.0f, g->mean);", ""),
    ("ops", "n = ampi_min_size(f->p.spatial, AMPI_LANES);", "n = 1;"),
    ("ops", "if (!(fabs((double)g->mean[c]) < 1e30)) g->mean[c] = 0.0f;", ";"),
    ("ops", "off = wide ? first - at : first;", "off = first - at;"),
    ("ops", "g->sum[c] = wide ? first : at + first;", "g->sum[c] = first;"),
    ("ops", "ampi_sum_rows(terms, &s, u, v, &q, 1, n, i + k > 0);", "ampi_sum_rows(terms, &s, u, v, &q, 1, n, i > 0);"),
    ("ops", "AMPI_LANE_OF(mean) - x[i]", "-x[i]"),
    ("ops", "to = add ? tile : ampi_open(", "to = ampi_open("),
    ("ops", "q->step = v && by_column;", "q->step = 0;"),
    ("ops", "const float same = v && !by_column ? v[row] : missing;", "const float same = v && !by_column ? v[0] : missing;"),
    ("ops", "r->v, at, n, d, r->all, r->tile)", "r->v, at, n, d, SIZE_MAX, r->tile)"),
    ("ops", "return masks + AMPI_LANES - ampi_min_size(n, AMPI_LANES);", "return masks;"),
    ("ops", "ampi_float(ampi_select_bits(in[l], ampi_bits(x[i + l]), 0xff800000u))", "x[i + l]"),
    ("ops", "gamma ? y[l] * gamma[l] : y[l], x[l], mean", "gamma ? y[l] : y[l], x[l], mean"),
    ("ops", "    if (terms == AMPI_DOT) t.d *= scale;\n", ""),
    ("ops", "(float)((double)x - center)", "x"),
    ("ops", "if (r->floats && r->at == at && r->n == n) return", "if (r->floats && r->n == n) return"),
    ("ops", "return ampi_round_up(ampi_div_up(rows, 32), 64);", "return ampi_round_up(ampi_div_up(rows, 16), 64);"),
    ("ops", "    if (rows == 0 && f.add_params) return AMP_OK;\n", ""),
    ("ops", "sums + width / 2 + k, m,", "sums + k, m,"),
    ("ops", "with_dx = dx && columns == d;", "with_dx = dx != NULL;"),
    ("ops", "if (dx && !(sums && with_dx))", "if (dx && !sums)"),
    ("ops", "(float)(s.dot[r] * (double)invstd[row + r] / (double)f->d)", "(float)(s.dot[r] / (double)f->d)"),
    ("ops", "ampi_read(y, at + i, rows * n, n), ampi_read(x, at + i,", "ampi_read(x, at + i, rows * n, n), ampi_read(x, at + i,"),
    ("ops", "e[k], inverse[r], -target)", "e[k], inverse[r], target)"),
    ("ops", "label = (size_t)f->labels[row + r] - i,", "label = (size_t)f->labels[row + r],"),
    ("ops", "while (row + r >= ampi_part_start(f->rows, first + 1)) first++;",
     "while (row + r > ampi_part_start(f->rows, first + 1)) first++;"),
    ("ops", "z, sum, f->smoothing - 1.0f,", "z, sum, -1.0f,"),
    ("ops", "(double)f->d - (double)max[r]) : 0.0f;", "(double)f->d) : 0.0f;"),
    ("ops", "bits[l] = (uint16_t)((size_t)i + l);", "bits[l] = (uint16_t)(((size_t)i + l) & 0xfbff);"),
    ("ops", "one[l] = 1.0f;", "one[l] = 1.5f;"),
    ("ops", "kind == AMPI_MSE_SLOPE ? 2.0f * factor : factor", "factor"),
    ("ops", "v[l] = table[bits[l]];", "v[l] = table[bits[l] & 0x7fff];"),
    ("ops", ": 1.0) * (double)weight / (double)n);", ": 1.0) * (double)weight);"),
    ("ops", "labels[i] < 0 || (size_t)labels[i] >= classes", "labels[i] < 0 || (size_t)labels[i] > classes"),
    # --- policy
    ("policy", "if (level == AMP_O0 || ampi_op_is_loss(op)) return AMP_RULE_FP32;",
     "if (level == AMP_O0) return AMP_RULE_FP32;"),
    ("policy", "if (level == AMP_O3) return AMP_RULE_LOW;", "if (level == AMP_O2) return AMP_RULE_LOW;"),
    ("policy", "d.level != AMP_O3 || ampi_styles[d.style].o3_masters", "1"),
    ("policy", "AMPI_REFUSE_POLICY(white && black,", "AMPI_REFUSE_POLICY(0,"),
    ("policy", "for (int i = 0; i < d.black_count; i++) ampi_policy_put(&out, d.black[i], AMP_RULE_FP32, AMP_REASON_BLACK);",
     "for (int i = 1; i < d.black_count; i++) ampi_policy_put(&out, d.black[i], AMP_RULE_FP32, AMP_REASON_BLACK);"),
    ("policy", "if (ampi_op_is_loss(op)) return rule == AMP_RULE_FP32;", ""),
    ("policy", "return !ampi_op_is_data(op) || rule == AMP_RULE_FOLLOW;", "return 1;"),
    ("policy", "if (out && count < capacity) out[count] = (amp_op)i;", "if (out && count <= capacity) out[count] = (amp_op)i;"),
    # --- scaler
    ("scaler", "if (factor) x = AMPI_K(mul)", "if (factor && count >= AMPI_LANES) x = AMPI_K(mul)"),
    ("scaler", "if (ampi_bits64_at(&sum) << 1 > clear << 1)", "if (ampi_bits64_at(&sum) << 1 > AMPI_INF64 << 1)"),
    ("scaler", "? AMPI_INF64 - 1 : ampi_bits64(most * most);", "? AMPI_INF64 - 1 : AMPI_INF64 - 1;"),
    ("scaler", "memcpy(rest, from, (n - i) * size)", "memcpy(rest, from, (n - i - 1) * size)"),
    ("scaler optim", "for (l = 0; l < 8; l++) tree[l] += tree[l + 8];", "for (l = 0; l < 8; l++) tree[l] += tree[15 - l];"),
    ("scaler", "return u > 0x00200000u &&", "return u > 0x00100000u &&"),
    ("scaler", "AMPI_REFUSE_DESC(r->min > init,", "AMPI_REFUSE_DESC(0,"),
    ("scaler", "r->interval = r->interval > INT32_MAX - row->late ? INT32_MAX : r->interval + row->late;", ""),
    ("scaler", "too_much ? r->max : grown", "too_much ? r->max / 2 : grown"),
    ("scaler", "grown < AMPI_FLT_OVERFLOW || r->guard == AMP_GUARD_NONE", "r->guard == AMP_GUARD_NONE || 1"),
    ("scaler", "    x->tracker = 0;\n    x->hyst", "    x->hyst"),
    ("scaler", "tracker = 0;\n    x->hysteresis_left = r->hysteresis;", "tracker = 0;"),
    ("scaler", "x->tracker < r->interval) return;", "x->tracker <= r->interval) return;"),
    ("scaler", "    x->consecutive_skips = 0;\n    if (r->refill != ", "    if (r->refill != "),
    ("scaler", "x->consecutive_skips > r->max_skips) hit = 2;", "x->consecutive_skips >= r->max_skips) hit = 2;"),
    ("scaler", "x->tracker = r->start;\n    if (x->hysteresis_left", "if (x->hysteresis_left"),
    ("scaler", "scale < min ? min : scale", "scale"),
    ("scaler", "r->is_double ? x->exact_scale : x->scale", "x->scale"),
    ("scaler", "if (ampi_scaler_presets[d.preset].kind & 1 && ampi_scaler_undoes(&x.rule)) x.rule.backoff = 0.0;", ""),
    ("scaler", "if (!(row->kind & 2)) r->growth = (float)r->growth;", ""),
    ("scaler", "if (d->preset == AMP_SCALER_APEX && ", "if (0 && "),
    ("scaler", "version > 1 ? ampi_scaler_exact", "0 ? ampi_scaler_exact"),
    ("scaler", "    x->found_inf = x->unsound = 0;\n    return hit;", "    return hit;"),
    ("scaler", "return t == AMP_F16 ? 0x7c00u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;",
     "return t == AMP_F16 ? 0x7c01u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;"),
    ("scaler", "if (to == AMP_F16) return (float)product >= 65520.0f;", "if (to == AMP_F16) return (float)product > 65520.0f;"),
    ("scaler", "if (c->inf + c->nan == 0) c->first = base + i;", "c->first = base + i;"),
    ("scaler", "unscaled ? 1.0f : s->state.inverse, 0, info);",
     "s->state.inverse, 0, info);"),
    ("scaler", "if (!s->scaled) ampi_scaler_use_scale(&s->state);", ""),
    ("scaler", "else if (what == AMPI_UNSCALED && *unscaled) wrong", "else if (0) wrong"),
    ("scaler", "if (ampi_scaler_record(s, &found, src->place) && dst",
     "if ((ampi_scaler_record(s, &found, src->place) | 1) && dst"),
    ("scaler", "if (!found->found_inf || s->rule.ignore_overflow) return 1;", "if (!found->found_inf) return 1;"),
    ("scaler", "table[i] = (table[i] >> 1) ^ (0xEDB88320u", "table[i] = (table[i] >> 1) ^ (0xEDB88321u"),
    ("scaler", "|| x->hysteresis_left > s->rule.hysteresis", ""),
    ("scaler", "return i < 4 ? (double)ampi_float", "return i < 5 ? (double)ampi_float"),
    ("scaler", "info->last_tensor != c->tensor) {", "!info->found_inf) {"),
    ("scaler", "memset(info->last_name, 0, sizeof info->last_name);", ""),
    ("scaler", "info->first_tensor = info->last_tensor = -1;", "info->first_tensor = -1;"),
    ("scaler", "found->found_inf && all->first_tensor < 0", "found->found_inf && !all->found_inf"),
    ("scaler", "if (ampi_scaler_fields[i].zero && ampi_bits64_at", "if (ampi_bits64_at"),
    ("scaler", "backoff_factor) || d->hysteresis != 0)", "backoff_factor))"),
    ("scaler", "type ^ (begin + x.count * ampi_type_size(x.dtype))) - ampi_mix(type ^ begin)", "type ^ x.count)"),
    ("scaler", "(uint64_t)ampi_dtype(x.dtype) << 61", "0"),
    ("scaler", "if (x.from < s->spans[k][1] && x.to > s->spans[k][0]) set", "if (x.from == s->spans[k][0]) set"),
    ("scaler", "if (x->to > s->spans[at][1]) s->spans[at][1] = x->to;", ""),
    ("scaler", "at < 0 || s->span_list[at] != list || (!full", "at < 0 || (!full"),
    ("scaler", "if (done & AMPI_UNSCALED && l != entry) l->done", "if (0) l->done"),
    ("scaler", "if (s->list_count == 0) s->span_count = 0;", ""),
    ("scaler", "*unscaled && sum != key", "0 && sum != key"),
    ("optim", "if (s->lists[i].key == key) return &s->lists[i];", "return &s->lists[i];"),
    ("optim", "if (set >> i & 1 && l->done & AMPI_UNSCALED) l->done |= done & AMPI_STEPPED;", ""),
    ("optim", "return list && list->done == AMPI_CHECKED ? list : NULL;", "return list;"),
    ("checkpoint", "AMPI_REFUSE_CALL(s && ampi_scaler_ready(s), ", "AMPI_REFUSE_CALL(0, "),
    ("optim", "if (logger) x.logger = *logger;", ""),
    # --- optim
    ("optim", "const int stays = size > over->last || ampi_magnitude(v) > over->finite;",
     "const int stays = size > over->last;"),
    ("optim", "over->last = has_master ? over->finite : over->low;", "over->last = over->finite;"),
    ("optim", "    if (i < n) ampi_update_singly(kind, w, g, m, v, i, n, constants, over);\n", ""),
    ("optim", "    if (kind >= AMPI_UPDATE_ADAM) x.v = ampi_flush(", "    if (kind >= AMPI_UPDATE_ADAM) x.v = ("),
    ("optim", "const float deviation = ampi_fma(hw, root, u->r2, u->eps);", "const float deviation = root * u->r2;"),
    ("optim", "u->step, direction, x.w * u->decay)", "u->step, direction, x.w)"),
    ("optim", "return ampi_float(ampi_magnitude(direction) > finite || ampi_magnitude(v) > finite ? 0u : ampi_bits(direction));", "return direction;"),
    ("optim", "if (AMPI_K(above_reg)(new_w, low) |", "if (0 |"),
    ("optim", "(kind >= AMPI_UPDATE_ADAM && AMPI_K(above_reg)(new_v, finite))", "0"),
    ("optim", "i, i + width, constants, over);", "i, i + width - 1, constants, over);"),
    ("optim", "else if (p->master && p->low && over.held + over.saturated > 0)", "else if (0)"),
    ("train", "if (causes & ~m->told_update)", "if (causes)"),
    ("optim", "if (!report.applied) report.grad_norm = ampi_double(AMPI_INF64);", ""),
    ("optim", "if (d->logger) made.logger = *d->logger;", ""),
    ("optim", "if (after < 0) return (double)(t + 1) / ((double)warmup + 1.0);",
     "if (after < 0) return (double)t / ((double)warmup + 1.0);"),
    ("optim", "    if (after >= whole) return last;\n", "    if (after > whole) return 0.0;\n"),
    ("optim", "d->weight_decay = ampi_default_at(&d->weight_decay, 0.0f);",
     "d->weight_decay = ampi_default_at(&d->weight_decay, d->kind == AMP_ADAMW ? 0.01f : 0.0f);"),
    ("optim", "AMPI_REFUSE_PARAM(moments > 1 && !p->v, AMP_ERR_ARGUMENT, \"v is NULL, but this optimizer needs it\");", ""),
    ("optim", "int first = t == 0;", "int first = 0;"),
    ("optim", "u->buf = d->nesterov ? d->momentum : 1.0f;", "u->buf = d->momentum;"),
    ("optim", "1.0 - ampi_pow_int(d->beta1, t + 1);", "1.0 - ampi_pow_int(d->beta1, t);"),
    ("optim", "sqrt(1.0 - ampi_pow_int(d->beta2, t + 1))", "sqrt(1.0 - ampi_pow_int(d->beta1, t + 1))"),
    ("optim", "int64_t t = o->state.step - o->state.frozen_steps[group];", "int64_t t = o->state.step;"),
    ("optim", "if (o->groups[i].frozen) o->state.frozen_steps[i]++;", ""),
    ("optim", "s->frozen_steps[i] < 0 || s->frozen_steps[i] > s->step, AMP", "s->frozen_steps[i] > s->step, AMP"),
    ("optim", "s->step < 0 || s->step >> 62, AMP", "s->step >> 63, AMP"),
    ("checkpoint", "if (x->kind < 'l') memcpy(x->at, &bits, sizeof bits);",
     "if (x->kind < 'l' && !(is_rate && x->of_group)) memcpy(x->at, &bits, sizeof bits);"),
    ("checkpoint", "x->optional = x->of_group && (kind != 'f' ||", "x->optional = x->of_group && (kind == 's' ||"),
    ("checkpoint", "if (x->optional && !x->text[strspn(x->text, \"0\")]) continue;", "if (x->optional) continue;"),
    ("checkpoint", "if (x->optional && !x->text[strspn(x->text, \"0\")]) continue;", ""),
    ("checkpoint", "(x->kind != 'l' && value > (x->kind == 's' ? most : UINT32_MAX)),", "0,"),
    ("checkpoint", "text || !x->optional ? text :", "text ? text :"),
    ("checkpoint", "if (text) crc =", "if (!x->optional) crc ="),
    ("checkpoint", "if (x == c->numbers) most = value;", ""),
    ("optim", "u->r2 = (float)(1.0 / sqrt(1.0 - ampi_pow_int(d->beta2, t + 1)));", "u->r2 = 1.0f;"),
    ("optim", "if (d->kind == AMP_ADAMW) u->decay =", "if (d->kind == AMP_ADAM) u->decay ="),
    ("optim", "if (d->kind != AMP_ADAM) u->l2 = 0.0f;", ""),
    ("optim", "u->mult = d->maximize ? -mult : mult;", "u->mult = mult;"),
    ("optim", "return coefficient < 1.0 ? coefficient : 1.0;", "return coefficient;"),
    ("optim", "o->desc.clip_norm / (norm + 1e-6)", "o->desc.clip_norm / norm"),
    ("optim", "(float)(factor * coefficient)", "(float)coefficient"),
    ("optim", "if (step->w_sum > 0.0 && step->direction_sum > 0.0)", "if (step->direction_sum > 0.0)"),
    ("optim", "else if (p->low) ampi_store_f32(p->low, p->low_dtype, i, w, n);", ""),
    ("optim", "return ampi_optimizer_validate(&d) == AMP_OK ?", "return d.kind <= AMP_LAMB ?"),
    ("checkpoint", "while (head > 0 && ampi_is_inside(text[head])) head--;", ""),
    ("hostile", "    feholdexcept(&floats);\n    for (size_t at = 0; at < n; at += AMPI_BLOCK) {", "    fegetenv(&floats);\n    for (size_t at = 0; at < n; at += AMPI_BLOCK) {"),
    ("checkpoint", "    AMPI_TRY(ampi_optimizer_check_rates(&c->o, c->saver));\n", ""),
    ("checkpoint", "    if (!m) AMPI_TRY(ampi_params_validate(&c.o));\n", ""),
    ("optim", "    o->state.step++;\n}\n", "    if (!o->desc.clip_norm) o->state.step++;\n}\n"),
    ("optim", "u->frozen = g->frozen;", "u->frozen = 0;"),
    # --- backend
    ("train", "if (!t->last.applied && bytes) memcpy(now, saved, bytes);", ""),
    ("train", "t->loss_scale = window ? &t->scaler.state.scale_in_use : &t->scaler.state.scale;", "t->loss_scale = NULL;"),
    ("train", "if (flags[0] != 0.0f || flags[1] != 0.0f) ampi_scaler_raise(&t->scaler, flags[1] != 0.0f);", ""),
    ("train", "ampi_scaler_raise(&t->scaler, flags[1] != 0.0f);", "ampi_scaler_raise(&t->scaler, 0);"),
    ("train", "while (count-- > 0) amp_scaler_scale_loss(&t->scaler, *losses++);", "(void)losses; (void)count;"),
    ("train", "if (!m->backend->asynchronous) {\n        AMPI_RUN(copy_out, found", "if (0) {\n        AMPI_RUN(copy_out, found"),
    ("train", "if (!n->blamed) ampi_remark", "ampi_remark"),
    ("fit", "i = n - 1; seed && i > 0; i--", "i = n - 2; seed && i > 0; i--"),
    ("fit", "2 * ((uint64_t)epoch * (uint64_t)n + (uint64_t)i)", "2 * (uint64_t)i"),
    ("fit", "sum += (double)part.loss * n;", "sum += (double)part.loss * f->m->desc.batch;"),
    ("fit", "(!f->info.best.best || loss < best)", "1"),
    ("fit", "f->waited >= f->d.patience", "f->waited > f->d.patience"),
    ("fit", "if (r != AMP_OK) return ampi_agree_on_batch(f->m, r);", "if (r != AMP_OK) return r;"),
    ("fit", "(!f->info.end || f->m->micro); at += total", "!f->info.end; at += total"),
    ("fit", "batches - batches % f->m->desc.accumulate;", "batches;"),
    ("fit", "int i = f->d.first_epoch; i < f->d.epochs", "int i = 0; i < f->d.epochs"),
    ("scaler", "    if (x->unsound) return hit;\n", ""),
    ("scaler", "comes_back = r->is_double && x", "comes_back = 0 && x"),
    ("scaler", "if (!ampi_scale_usable(&x->scale) && !comes_back) hit |= 8;", ""),
    ("scaler", "x->consecutive_unsound > r->max_unsound) hit |= 4;", "x->consecutive_unsound >= r->max_unsound) hit |= 4;"),
    ("scaler", "if (!x->unsound) x->consecutive_unsound = 0;", "if (x->applied < 0) x->consecutive_unsound = 0;"),
    ("scaler", "if (!ampi_is_finite(&loss)) ampi_scaler_raise(s, 1);", ""),
    ("scaler", "{ 120, 4, 1, offsetof", "{ 120, 4, 0, offsetof"),
    ("train", "t->scaler.scaled = t->scaler.recorded = t->scaler.list_count = 0;", ""),
    # --- model
    ("model", "return offered && !m->pass.observed && next", "return offered && next"),
    ("model", "ampi_is(next, RELU) && next->layer.in_place\n", "ampi_is(next, RELU)\n"),
    ("model", "           && next->reads[0] == n;", "           ;"),
    ("model", "AMPI_TRY(ampi_forward_node(m, n, relu));", "AMPI_TRY(ampi_forward_node(m, n, 0));"),
    ("model", "return n && n->tag == v.tag ? n : NULL;", "return n;"),
    ("model", "inputs[i] = n->inputs[i]->tag;", "(void)0;"),
    ("model", "const int fits = op == AMP_OP_ADD ? a->channels == b->channels :", "const int fits = op == AMP_OP_ADD ? 1 :"),
    ("model", "n->loss_weight = d->weight == 0.0f ? 1.0f : d->weight;", "n->loss_weight = 1.0f;"),
    ("model", "!n->pin_dtype || dtype < n->pin_dtype", "!n->pin_dtype || dtype > n->pin_dtype"),
    ("model", "n->row->kind != AMPI_KIND_DATA && !ampi_is_loss(n)) {", "n->row->kind != AMPI_KIND_DATA) {"),
    ("model", "(rule == AMP_RULE_LOW && m->policy.cast_back) ? AMP_F32 : *t;", "0 ? AMP_F32 : *t;"),
    ("model", "(!n->leads || (first == AMP_F32 && second == AMP_F32))", "(first == AMP_F32 && second == AMP_F32)"),
    ("model", "level == AMP_O2 ? ampi_styles[m->policy.style].o2_scaler :", ""),
    ("model", "*t = first == second ? first : AMP_F32;", "*t = second;"),
    ("model", "n->wanted = !n->wanted || n->wanted == t ? t : AMP_F32;", "n->wanted = t;"),
    ("model", "n->reads[0] == source && ampi_stored(n) == dtype) return n;", "0) return n;"),
    ("model", "if (ampi_is_norm(n)) return is_bias ? 0.0f : 1.0f;", "if (ampi_is_norm(n)) return 1.0f;"),
    ("model", "return u * sqrtf(6.0f / (float)(n->fan_in + n->fan_out));", "return u * sqrtf(6.0f / (float)n->fan_in);"),
    ("model", "ampi_initial_weight(n, index == n->bias, seed, at + i);", "ampi_initial_weight(n, index == n->bias, seed, i);"),
    ("model", "n->stats = ampi_floats_take(m, AMPI_BLOCK_STEP, each);", "n->stats = ampi_floats_take(m, AMPI_BLOCK_STEP, each / 2);"),
    ("conv", "p->column += ampi_max_size(p->x, c->pitch) - p->x;", "p->column += c->pitch - p->x;"),
    ("model train", "if (o->last < l->first || o->first > l->last) continue;", "if (o->last < l->first || o->first >= l->last) continue;"),
    ("model", "if (in->grad_written) ampi_lease_use(&n->leases[AMPI_LEASE_PART + j], back, bytes);", ""),
    ("model", "AMPI_REFUSE_LAYER(!has_labels && d->smoothing != 0.0f,", "AMPI_REFUSE_LAYER(0,"),
    ("model", "else if (!ampi_is_utf8(name))\n", "else if (0)\n"),
    ("model", "size_t at = offsetof(amp_backend, open);", "size_t at = sizeof *b;"),
    ("model", "return b->name != NULL;", "return 1;"),
    # --- train
    ("train", "(float)(1.0 / ((double)m->desc.accumulate * m->comm.size))", "(float)(1.0 / (double)m->desc.accumulate)"),
    ("train", "training, m->micro > 0,", "training, 0,"),
    ("train hostile", "    feholdexcept(&floats);  /* an overflow is data here, not a trap */", "    fegetenv(&floats);"),
    ("train model", "if (dx && dx != x->grad)\n", "if (0)\n"),
    ("train", "&& told.attempts <= m->desc.max_replays", "&& info->attempts < m->desc.max_replays"),
    ("train", "    if (m->pass.training)\n", "    if (1)\n"),
    ("train model", "X(GELU,       \"gelu\",       FOLLOW,  LOW,     PLAIN,  INPUT, ",
     "X(GELU,       \"gelu\",       FOLLOW,  LOW,     PLAIN,  OUTPUT,"),
    ("train", "offset = each * (uint64_t)m->comm.rank +", "offset = 0 * (uint64_t)m->comm.rank +"),
    ("train", "if (row[k] > row[best]) best = k;", "if (row[k] >= row[best]) best = k;"),
    ("train hostile", "AMPI_REFUSE(label < 0 || label >= classes,", "AMPI_REFUSE(label >= classes,"),
    ("train", "x[k] = (x[k] - mean[0]) / mean[how->channels];", "x[k] = x[k] / mean[how->channels] - mean[0];"),
    ("train", "if (how.constants || how.scale != 0.0f || from == AMP_U8)", "if (from == AMP_U8)"),
    ("train", "int failed = own != AMP_OK;", "int failed = 0;"),
    ("train", "dynamic |= n->layer.compute_dtype == AMP_F16;", ";"),
    ("train", "if (b->on_device && m->backend->asynchronous) return AMP_OK;", "if (b->on_device) return AMP_OK;"),
    ("train", "if (m->saved) ampi_copy_running(m, 1);", "ampi_copy_running(m, 1);"),
    ("train", "m->training.passes -= (uint64_t)(m->micro - 1);", ""),
    ("train", "    if (r != AMP_OK && !last) return ampi_abandon_step(m, r);", ""),
    ("train", "if (!any && m->desc.accumulate > 1)\n", "if (0)\n"),
    ("train", "sum += (double)m->losses[i]->loss_weight * values[i];", "sum += values[i];"),
    ("train", "AMPI_REFUSE(n->running && !n->norm.frozen &&", "AMPI_REFUSE(n->running &&"),
    ("train", "if (!n->on_loss_path || !n->wants_grad || a", "if (!n->on_loss_path || !n->needs_grad || a"),
    ("train", "if (frozen < m->param_count && ampi_is_frozen_now(m, p)) p->grad = NULL;",
     "if (ampi_is_frozen_now(m, p)) p->grad = NULL;"),
    ("train", "m->grad_list[i].count = p->grad ? p->count : 0;", ""),
    ("train", "p = m->params; m->micro && p < m", "p = m->params; 0 && p < m"),
    ("train", "if (!ampi_scale_usable(&info->scale_before))\n", "if (0)\n"),
    ("train", "else if (!counted && alone)", "else if (0)"),
    ("train", "if (info && (r == AMP_OK || r == AMP_ERR_OVERFLOW)) *info = told;", "if (info) *info = told;"),
    ("train", "const int several = o->last_tensor != o->first_tensor, alone", "const int several = o->last_tensor > 1, alone"),
    ("train", "if (info && (r == AMP_OK || r == AMP_ERR_OVERFLOW)) *", "if (info && r == AMP_OK) *"),
    # --- checkpoint
    ("checkpoint", "{ remove(temporary); return r; }", "return r;"),
    ("checkpoint", "AMPI_REFUSE_FILE(!e->crc != !crc_text,", "AMPI_REFUSE_FILE(0,"),
    ("checkpoint", "S_ISREG((st).st_mode)", "!S_ISDIR((st).st_mode)"),
    ("checkpoint", "AMPI_OS(O_CREAT) | AMPI_OS(O_EXCL)", "AMPI_OS(O_CREAT)"),
    ("checkpoint", "errno == EEXIST && ++tries < 100", "0"),
    ("checkpoint", "is_there ? (unsigned)st.st_mode & 0777u : 0666u", "0666u"),
    ("checkpoint", "(void)fchmod(fd, (mode_t)mode)", "(void)0"),
    ("checkpoint", "if (fd >= 0 && fsync(fd) != 0 && errno == EIO) r =", "if (fd >= 0 && fsync(fd) != 0 && 0) r ="),
    ("checkpoint", "while (tail > 0 && ampi_is_inside(text[n - tail])) tail--;", ""),
    ("checkpoint", "    ampi_put_header(f, header);\n", "    ampi_put_header(f, header + 8);\n"),
    ("checkpoint", "AMPI_REFUSE_FILE(e->begin != end,", "AMPI_REFUSE_FILE(e->begin > end,"),
    ("checkpoint", "c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;", "c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0xffff ? 2 : 3;"),
    ("checkpoint", "strspn(j->at + 1, \"0123456789abcdefABCDEF\") < 4", "strspn(j->at + 1, \"0123456789abcdef\") < 4"),
    ("checkpoint", "if (first > 0) first--;", "if (first > 1) first--;"),
    ("checkpoint", "(!as_bits || *n <= UINT32_MAX)", "(as_bits || *n <= UINT32_MAX)"),
    ("checkpoint", "e->place = (size_t)total;", "e->place = 0;"),
    ("checkpoint", "AMPI_REFUSE_FILE(end < f->bytes,", "AMPI_REFUSE_FILE(0,"),
    ("checkpoint", "AMPI_REFUSE_FILE(n < 2 || n > AMPI_MAX_HEADER,", "AMPI_REFUSE_FILE(n > AMPI_MAX_HEADER,"),
    ("checkpoint", "memchr(letters, *j->at, sizeof letters - 1);", "memchr(letters, *j->at, sizeof letters);"),
    ("checkpoint", "n->group, n->inputs[0] ? n->inputs[0]->number : AMPI_NONE,", "n->group, 0,"),
    ("checkpoint", "if (low >> 10 == 0x37) c =", "if (low) c ="),
    ("checkpoint", "AMPI_REFUSE_FILE(end > f->bytes,", "AMPI_REFUSE_FILE(0,"),
    ("checkpoint", "AMPI_REFUSE_FILE(n > f->bytes - 8,", "AMPI_REFUSE_FILE(0,"),
    ("checkpoint", "    if (!ampi_is_utf8(text)) ampi_json_fail(", "    if (0) ampi_json_fail("),
    ("checkpoint", "if (errno == ERANGE)", "if (0)"),
    ("checkpoint", "(int)(7 - at % 8)", "(int)(8 - at % 8)"),
    ("checkpoint", "if (!twice) twice = ampi_sort_names(names", "if (0) twice = ampi_sort_names(names"),
    ("checkpoint", "if (!twice) twice = ampi_sort_names(f->found", "if (0) twice = ampi_sort_names(f->found"),
    ("checkpoint", " AMPI_SETTING(beta2, 'f'),", ""),
    ("checkpoint", "{ \"pass\", &c->passes, 'l', AMPI_LOADED }", "{ \"pass\", &c->passes, 'l', AMPI_KEPT }"),
    ("checkpoint", "else ampi_params_write_low(o);", ""),
    ("checkpoint", "uint32_t group = (uint32_t)o->params[i].group;", "uint32_t group = 0;"),
    ("checkpoint", "if (!c->scaler && !text) return AMP_OK;", "if (!c->scaler) return AMP_OK;"),
    ("checkpoint", "strlen(name) + 3 > sizeof *names,", "strlen(name) + 2 > sizeof *names,"),
    ("checkpoint", " *c->scaler = c->s; }", " }"),
    ("checkpoint", "k < (p && weights_alone ? 1 : 3); k++) {", "k < 3; k++) {"),
    ("checkpoint", "if (f->missing_count++ < 3) snprintf(", "if (f->missing_count++ < 2) snprintf("),
    ("checkpoint", "    if (f->missing_count > 0)\n", "    if (1)\n"),
    ("checkpoint", "if ((x->role == AMPI_KEPT || is_rate)", "if (is_rate"),
    ("checkpoint", "if (code != AMP_OK) AMPI_SAY(m->error", "AMPI_SAY(m->error"),
    ("checkpoint", "    AMPI_TRY(amp_model_sync_params(f->model));\n", ""),
    ("checkpoint", "    AMPI_REFUSE_FILE(f->missing_count == f->count,", "    AMPI_REFUSE_FILE(0,"),
    ("checkpoint", "dtype = ampi_dtype(e && weights_alone ? e->dtype : t->tensor.dtype);",
     "dtype = ampi_dtype(weights_alone ? t->tensor.dtype : t->tensor.dtype);"),
    ("checkpoint", "fits && i < sizeof bytes && sscanf(", "fits && i < sizeof bytes - 1 && sscanf("),
    ("checkpoint", "for (crc = ~crc; n > 0; n--)", "for (crc = ~crc; n > 1; n--)"),
    ("checkpoint", "table[(crc ^ *p++) & 0xffu];", "table[(crc ^ *p++) & 0x7fu];"),
    ("checkpoint", "AMPI_REFUSE_FILE(e->crc && strcmp(ampi_show_number(", "AMPI_REFUSE_FILE(0 && strcmp(ampi_show_number("),
    ("checkpoint", "        if (!e) continue;\n        e->crc = t->value;",
     "        if (!e) break;\n        e->crc = t->value;"),
    ("checkpoint", "AMPI_REFUSE_FILE(!ampi_read_number(e->crc, 1, &crc),", "AMPI_REFUSE_FILE(0,"),
    ("checkpoint", " || strncmp(texts[i].key, AMPI_CRC_KEY, sizeof AMPI_CRC_KEY - 1) == 0,\n", ",\n"),
    ("checkpoint", "(crc_text && strcmp(crc_text,", "(0 && strcmp(crc_text,"),
    ("optim", "!ampi_lr_is_valid(value, 1), code", "!ampi_lr_is_valid(value, i % 2), code"),
    ("optim", "for (int i = 0; i < 2 * count; i++) {\n        const float* value", "for (int i = 0; i < 2 * count; i += 2) {\n        const float* value"),
    ("checkpoint", "if (x->role == AMPI_LOADED) crc =", "if (x->role == AMPI_LOADED && n < 3) crc ="),
    ("optim", "return o->desc.group_count > 0 ? o->desc.group_count : 1;", "return o->desc.group_count;"),
    ("optim", "int moments = ampi_param_frozen(o, p) ? 0 : ampi_moment_count(&o->desc);", "int moments = ampi_moment_count(&o->desc);"),
    ("optim", "const size_t sizes[] = { 4, 2,", "const size_t sizes[] = { 4, 4,"),
    ("optim", "moments > 1 ? p->v : NULL }", "NULL }"),
    ("optim", "k < i && y.from < high", "k + 1 < i && y.from < high"),
    ("model checkpoint", "code >> 11 == 0xd800 >> 11 || ", ""),
    ("optim", "if (y.from == y.to) continue;", ""),
    ("optim", "if (x.from >= x.to || x.from >= y.to ||", "if (x.from >= x.to || x.from > y.to ||"),
    ("scaler", "            *a = k;\n", "            *a = i;\n"),
    ("scaler", "|| !(x.written | y.written)) continue;", ") continue;"),
    ("scaler", "ampi_tensor_span(two->src, i - count, 0);", "ampi_tensor_span(two->src, i - count, 1);"),
    ("scaler", "&& !t->apart ? ampi_tensors_apart(s, t, NULL) : AMP_OK;", "? AMP_OK : AMP_OK;"),
    ("scaler", "return ampi_tensors_apart(s, dst, src);", "return AMP_OK;"),
    ("optim", "    AMPI_TRY(ampi_optimizer_check_rates(o, place));\n", ""),
    ("optim", "    if (!own.log) s->logger = o->logger;", ""),
    ("checkpoint", "f->crcs[i] = ampi_crc32(f->crcs[i], f->data, n);", "f->crcs[i] = ampi_crc32(0, f->data, n);"),
    ("checkpoint", "f->crcs[i] = ampi_crc32(", "f->crcs[0] = ampi_crc32("),
    # --- report
    ("report", "if (e < ampi_ranges[dtype].min_exponent) s->subnormals++;",
     "if (e <= ampi_ranges[dtype].min_exponent) s->subnormals++;"),
    ("report", "if (a > AMPI_INF64) { s->nans++; return; }", ""),
    ("report", "s->histogram[bin < 0 ? 0 : bin >= AMP_STATS_BINS ? AMP_STATS_BINS - 1 : bin]++;",
     "s->histogram[bin < 0 ? 0 : bin > AMP_STATS_BINS ? AMP_STATS_BINS - 1 : bin]++;"),
    ("report", "& 0x007fffffu) > last);", "& 0x007fffffu) >= last);"),
    ("report", "if (!add) AMPI_CLEAR(*out);", ""),
    ("report", "(suggested <= 0.0 || limit < suggested)) suggested", "(suggested <= 0.0 || limit > suggested)) suggested"),
    ("report", "        forward |= bad && k < 2;\n", ""),
    ("report", "0 : e < formats[i].normal ? 1 : 3;", "0 : e < formats[i].normal ? 3 : 1;"),
    ("report", "150.0 + width * (i + 0.5)", "150.0 + width * (i + 1.5)"),
    ("report", "if (*text == '<' || *text == '&')", "if (*text == '<')"),
    ("report", "else putc(*text >= 32 && *text < 127 ? *text : '?', p->out);", "else putc(*text, p->out);"),
    ("report", "info->outcome != AMP_STEP_ACCUMULATED) h->steps", "1) h->steps"),
    ("report", "(h->count - (uint64_t)(count - i)) % AMP_HISTORY_STEPS", "(uint64_t)i"),
    ("report", "kept[j]->outcome > AMP_STEP_ACCUMULATED && !strcmp", "!strcmp"),
    ("report", "if (!known || y[i] < low) low = y[i];", "if (y[i] < low) low = y[i];"),
    ("report", "last->update_name : last->overflow.last_name,", "last->update_name : last->overflow.first_name,"),
    ("report", "    m->suspect = n;\n", "    m->suspect = m->first;\n"),
    ("report", "r = p->master ? ampi_collect(m, &to->weight, p->master,", "r = p->master ? ampi_collect(m, &to->weight, p->grad,"),
    ("report", "if (out) return ferror(out) ? AMP_ERR_IO : AMP_OK;", "if (out) return AMP_OK;"),
    ("report", "        if (s->count == 0) continue;\n", ""),
]

# Of code that runs on some processors only: a flag of /proc/cpuinfo, and rows as above.
SPECIAL = {
    "avx512_bf16": [
    ],
    "amx_bf16": [
    ],
}


def here(flag):
    try:
        return " " + flag + " " in open("/proc/cpuinfo").read().replace("\n", " ")
    except OSError:
        return False


TABLE += [row for flag in SPECIAL if here(flag) for row in SPECIAL[flag]]


def is_avx512(text, start, end):
    """Does what stands there belong to a function or macro with AVX-512, as it says before that or there?"""
    begin = max(m.start() for m in re.finditer(r"^(?:AMP_DEF|AMPI_|#define )", text[:start + 1], re.M))
    return re.search("AVX512|TARGET_PAIRS|_mm512", text[begin:end])


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
JOBS = int(os.environ.get("JOBS", "2"))


class Refused(Exception):
    """By the compiler."""


class Header:
    """What receives the faults, its tests, and how both are built. amp.h here."""
    name = "amp.h"
    table = TABLE
    tests = "half gemm conv ops policy scaler optim model train fit checkpoint report alloc hostile".split()
    seconds = 60    # of the processor, for one test: a busy machine makes no hang
    out = os.path.join(ROOT, "build", "mutants")
    compiler = os.environ.get("CC", "gcc")
    # Compiles in half the time of -O2; without the second, gcc leaves vzeroupper out and SSE code after AVX crawls.
    flags = ["-std=c99", "-w", "-Og", "-fexpensive-optimizations"] + ([] if here("avx512f") else ["-DAMP_NO_AVX512"])
    test_flags = ["-std=c99", "-w", "-O2", "-DTEST_STOP=1"]

    def compile(self, *arguments):
        done = subprocess.run([self.compiler, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise Refused(done.stderr[:400])

    def build_tests(self):
        for test in self.tests + ["openmp"]:
            self.compile(*self.test_flags, *self.threads(test), "-c", os.path.join(ROOT, "tests", "test_%s.c" % test), "-o",
                         os.path.join(self.out, test + ".o"))

    def stages(self, likely):
        """Where a fault is looked for, the cheap way first: more flags, tests, of long lists of cases every n-th."""
        if likely == "openmp":
            return [([], [likely], 1)]
        first = [w for w in likely.split() if w in self.tests]
        rest = [t for t in self.tests if t not in first]
        return [(["-DAMP_NO_SIMD"], first, 3), ([], first + rest, 1)]

    def build(self, folder, likely, more):
        """The implementation with its fault, in this folder."""
        self.compile(*self.flags, *more, *self.threads(likely), "-x", "c", "-DAMP_IMPLEMENTATION", "-c", os.path.join(folder, self.name), "-o",
                     os.path.join(folder, "impl.o"))

    def link(self, test, folder, likely, program):
        self.compile(os.path.join(self.out, test + ".o"), os.path.join(folder, "impl.o"), "-o", program, "-lm",
                     *self.threads(test))

    def threads(self, tests):
        return ["-fopenmp"] if tests == "openmp" else []


def failing_test(header, folder, likely, tests, every):
    """The first of the tests that fails with the implementation in this folder, and how; None if all pass."""
    for name in tests:
        program = os.path.join(folder, "test_" + name)
        header.link(name, folder, likely, program)
        done = subprocess.run(["sh", "-c", "ulimit -t %d; exec \"$0\"" % header.seconds, program], cwd=folder,
                              capture_output=True, text=True, errors="replace",
                              env=dict(os.environ, OMP_WAIT_POLICY="passive", TEST_EVERY=str(every)))
        os.remove(program)
        if done.returncode:
            ended = {signal.SIGKILL: "hangs", signal.SIGXCPU: "hangs"}
            failed = re.findall(r"^FAILED: (\w+)", done.stdout, re.M)
            return failed[0] if failed else "test_%s %s" % (name, ended.get(-done.returncode, "crashes"))
    return None


def leaves_no_trace(header, number, folder, stage):
    """Is this stage's object the one of the header without a fault, which is kept of the first stage?"""
    made, kept = os.path.join(folder, "impl.o"), os.path.join(header.out, "none.o")
    if stage > 0 or not os.path.exists(made):
        return False
    if number == "none":
        shutil.copy(made, kept)
        return False
    return open(made, "rb").read() == open(kept, "rb").read()


def try_one(header, number, text, row):
    likely, pattern, replacement = row
    folder = os.path.join(header.out, str(number))
    os.makedirs(os.path.join(folder, "build"), exist_ok=True)
    with open(os.path.join(folder, header.name), "w") as f:
        f.write(text.replace(pattern, replacement))
    found = None
    try:
        for stage, (more, tests, every) in enumerate(header.stages(likely)):
            if number == "none":        # the tests that the rows name
                tests = [t for t in tests if t in likely.split()]
            header.build(folder, likely, more)
            if not leaves_no_trace(header, number, folder, stage):
                found = failing_test(header, folder, likely, tests, every)
            if found:
                break
    except Refused as complaint:
        return "does not compile", str(complaint)
    finally:
        shutil.rmtree(folder)
    return ("caught", found) if found else ("SURVIVED", "")


def choose(header, text):
    """The rows that are asked for, each with its room and line, and how many do not fit the header any more."""
    tags = [(m.start(), m.group(1)) for m in re.finditer(r"^/\* >>impl-([a-z]+)", text, re.M)]
    words = [w for w in sys.argv[1:] if not re.fullmatch("1/[1-9][0-9]*", w)]
    every = int((["1"] + [w[2:] for w in sys.argv[1:] if w not in words])[-1])
    rows, rotten, foreign = [], 0, 0
    for number, row in enumerate(header.table):
        if text.count(row[1]) != 1:
            rotten += 1
            print("stands %d times in %s: %s" % (text.count(row[1]), header.name, row[1]))
            continue
        if number % every:
            continue
        place = text.index(row[1])
        if not here("avx512f") and header.table is TABLE and is_avx512(text, place, place + len(row[1])):
            foreign += 1
            continue
        room = ([""] + [name for start, name in tags if start < place])[-1]
        if not words or any(w in room + " " + row[0] + " " + row[1] for w in words):
            rows.append((room, text.count("\n", 0, place) + 1, row))
    if foreign: print("skipped: %d faults in code for AVX-512" % foreign)
    return rows, rotten


def main(header):
    text = open(os.path.join(ROOT, header.name)).read()
    rows, rotten = choose(header, text)
    os.makedirs(header.out, exist_ok=True)
    header.build_tests()
    began = time.time()
    state, why = try_one(header, "none", text, (" ".join(sorted({w for row in rows for w in row[2][0].split() if not w.isdigit()})), "", ""))
    if state != "SURVIVED":
        print("without any fault:", state, why)
        return 1
    counts, survivors = {}, []
    with ThreadPoolExecutor(JOBS) as pool:
        done = pool.map(lambda i: try_one(header, i, text, rows[i][2]), range(len(rows)))
        for (room, line, row), (state, why) in zip(rows, done):
            counts[state] = counts.get(state, 0) + 1
            print("%-10s %5d %-16s %-32s %s  ->  %s" % (room, line, state, why, " ".join(row[1].split())[:70],
                                                      " ".join(row[2].split())[:70] or "nothing"), flush=True)
            if state != "caught":
                survivors.append((room, line, row[1]))
    caught = 100.0 * counts.get("caught", 0) / max(1, len(rows) + rotten)
    for room, line, pattern in survivors:
        print("not caught: %s, line %d: %s" % (room, line, pattern))
    print("%d faults in %d rooms, %d caught (%.1f %%), %d not, %.0f s"
          % (len(rows) + rotten, len({r[0] for r in rows}), counts.get("caught", 0), caught,
             len(survivors) + rotten, time.time() - began))
    return 0 if rows and not rotten and caught >= MINIMUM and not counts.get("does not compile") else 1


if __name__ == "__main__":
    sys.exit(main(Header()))
