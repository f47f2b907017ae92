"""mutants.py [1/N] [WORD...] - plants one small fault at a time in a copy of amp.h and sees whether a test fails.

Each row of the table: the tests most likely to see it ("openmp": that one alone, with -fopenmp), a piece of amp.h that
stands there exactly once (otherwise the row counts as not caught, so the table cannot rot), and what replaces it. The
fault's room is the >>impl- tag above it. The likely tests run first, then all others; the first failure, crash or hang
ends it. Fails if fewer than 95 % are seen, or if one does not compile. With words, only rows whose room, tests or
pattern contain one of them; with 1/N, only every Nth row. CC: the compiler, default gcc; JOBS: at a time, default 2.
Needs only Python itself.
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
    ("ops alloc", "if (b != 0 && a > SIZE_MAX / b) return 0;", "if (b != 0 && a > SIZE_MAX) return 0;"),
    ("alloc", "if (size == 0) size = 1;", "if (size == 0) return NULL;"),
    ("alloc", "if (a && a->free) a->free(p, a->user_data);", "if (a && !a->free) a->free(p, a->user_data);"),
    ("hostile", "if (!logger || !logger->log) return code;", "if (!logger) return code;"),
    ("hostile", "if ((unsigned char)*p < 0x20) *p = ' ';", "if ((unsigned char)*p < 0x10) *p = ' ';"),
    ("optim", "return ampi_is_zero(p) ? value : ampi_is_off(p) ? 0.0f : *p;", "return ampi_is_zero(p) ? value : *p;"),
    ("hostile", "    if (ampi_is_finite(&weight)) return AMP_OK;", "    if (1) return AMP_OK;"),
    ("ops", "    if (rows == 0 && accumulate) return AMP_OK;", ""),
    ("gemm ops", "if (err != 0.0 && !(u & 1u)", "if (err != 0.0 && (u & 1u)"),
    ("gemm ops", "((err > 0.0) == (sum > 0.0)) ? u + 1u : u - 1u", "((err > 0.0) == (sum > 0.0)) ? u - 1u : u + 1u"),
    ("gemm ops", "if ((u & 0x1fffffffu) != 0x10000000u", "if ((u & 0x1fffffffu) != 0x1fffffffu"),
    ("ops", "ampi_philox(seed, index >> 2, r);", "ampi_philox(seed, index >> 1, r);"),
    ("ops", "(float)(amp_random_bits(seed, index) >> 8)", "(float)(amp_random_bits(seed, index) >> 7)"),
    # --- cpu
    ("half", "if (!ampi_isa_available(isa)) return AMP_ERR_UNSUPPORTED;", ""),
    ("half", "case AMP_ISA_AVX2: return \"avx2\";", "case AMP_ISA_AVX2: return \"avx\";"),
    # --- half
    ("half", "rest = _mm512_set1_epi32(0x7ffe);", "rest = _mm512_set1_epi32(0x7fff);"),
    ("half", "k = 13u + (below < 12u ? below : 12u)", "k = 13u + (below < 11u ? below : 11u)"),
    ("half", "nearest = (1u << (k - 1u)) - 1u + ((sig >> k) & 1u)", "nearest = (1u << (k - 1u))"),
    ("half", "h = h > 0x7c00u ? 0x7c00u : h;", ""),
    ("half", "h = mag > 0x7f800000u ? 0x7e00u |", "h = mag > 0x7f800000u ? 0x7c00u |"),
    ("half", "u + 0x7fffu + (u >> 16 & 1u)", "u + 0x8000u"),
    ("half", "quiet = u | 0x400000u;\n    return (uint16_t)(((u", "quiet = u;\n    return (uint16_t)(((u"),
    ("half", "u = mag < 0x400u ? tiny - (24u << 23) : u;", "u = mag < 0x3ffu ? tiny - (24u << 23) : u;"),
    ("half", "u = mag > 0x7c00u ? u | 0x400000u : u;", ""),
    ("half", "u = mag < 0x800000u ? tiny - ((uint64_t)149u << 52) : u;", ""),
    ("half", "uint64_t up = s.rest + (s.kept & 1u) > middle ? 1u : 0u;", "uint64_t up = s.rest > middle ? 1u : 0u;"),
    ("half", "random < s.rest >> (shift < 63u ? shift : 63u)", "random <= s.rest >> (shift < 63u ? shift : 63u)"),
    ("half", "ampi_load_magnitude(p) > 0x7f800000u; }", "ampi_load_magnitude(p) >= 0x7f800000u; }"),
    ("half", "__mmask16 m = (__mmask16)(n - i < 16 ? (1u << (n - i)) - 1u : 0xffffu);",
     "__mmask16 m = (__mmask16)(n - i < 16 ? (1u << (n - i - 1)) - 1u : 0xffffu);"),
    ("half", "_mm256_permute4x64_epi64(words, 0xd8)", "words"),
    ("half", "ampi_round_random(out, wide, random + skip,", "ampi_round_random(out, wide, random,"),
    ("half", "(uint64_t)~random[l] << (cut - 32u)", "(uint64_t)random[l] << (cut - 32u)"),
    ("half", "case AMP_BF16: ampi_f32_to_bf16((uint16_t*)dst + offset, src, n); break;",
     "case AMP_BF16: ampi_f32_to_half((uint16_t*)dst + offset, src, n); break;"),
    ("half", "(size_t)(backwards ? blocks - 1 - i : i)", "(size_t)i"),
    ("half hostile", "if (d != s && d < s + n * src_size && s < d + n * dst_size)",
     "if (d != s && d < s + n && s < d + n)"),
    ("half", "if (t == AMP_BF16) ampi_saturate16(", "if (t == AMP_F16) ampi_saturate16("),
    ("half", "job->desc.offset + first);", "job->desc.offset);"),
    ("half", "job->src += lead * src_size;", ""),
    ("half", "job->n -= lead;", ""),
    ("half", "for (k = i; k < AMPI_CONVERT_CHUNK; k += part) {", "for (k = i; k + part < AMPI_CONVERT_CHUNK; k += part) {"),
    ("half", "return (64 - (size_t)((uintptr_t)p % 64)) % 64 / size;", "return (64 - (size_t)((uintptr_t)p % 64)) % 64;"),
    # --- gemm
    ("gemm", "for (k = 0; k < b->kc; k += step)\n        for (i = q; i < past; i++)\n            ampi_pack_runs(g, &s->a",
     "for (k = 0; k < step; k += step)\n        for (i = q; i < past; i++)\n            ampi_pack_runs(g, &s->a"),
    ("gemm", "        f.beta = 1.0f;", ""),
    ("gemm", "ampi_min_size(kc, s->b.length - k0) / 16 * 16", "kc / 16 * 16"),
    ("gemm", "const size_t even = flip * ldd, odd = ldd - even;", "const size_t even = 0, odd = ldd;"),
    ("gemm", "if (f->add && (i == 0 || f->ld_add != 0))", "if (f->add && i == 0)"),
    ("gemm", "u->widen = s->b.dtype == AMP_F16;", "u->widen = 0;"),
    ("gemm", "ampi_pack_b_any(g, s, b, b->j0 + b->packed, b->nc - b->packed);",
     "ampi_pack_b_any(g, s, b, b->j0, b->nc - b->packed);"),
    ("gemm", "    ampi_block_pack(g, s, b);\n    for (; i <", "    for (; i <"),
    ("gemm", "    u->widen = 0;\n", ""),
    ("gemm", "#define AMPI_W8_LOAD_B(p) AMPI_V8_F16(p)", "#define AMPI_W8_LOAD_B(p) AMPI_V8_BF16(p)"),
    ("gemm", "how < ways; how++", "how < AMPI_GEMM_A_ALONG; how++"),
    ("gemm", "how < ways; how++", "how < ways; how += AMPI_GEMM_A_ALONG"),
    ("gemm", "    if (rest >= 16) _mm256_storeu_si256((__m256i*)(void*)((uint16_t*)dst + i), h);",
     "    if (rest >= 8) _mm256_storeu_si256((__m256i*)(void*)((uint16_t*)dst + i), h);"),
    ("gemm", "if (f->add) name##_as(f->c_dtype, 1,", "if (f->add) name##_as(f->c_dtype, 0,"),
    ("gemm conv", "b->finish = b->last && g->finish && ampi_c_is_matrix(s)", "b->finish = b->last && g->finish"),
    ("gemm", "f.ld_add = s->bias_per_row ? 1 : 0;", "f.ld_add = 1;"),
    ("gemm", "return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);",
     "(void)odd; return _mm512_add_epi32(u, _mm512_set1_epi32(0x8000));"),
    ("gemm", "c##i##0 = AMPI_##V##_CLEAN(c##i##0);", ""),
    ("gemm", "b->last = k0 + b->kc == s->k;", "b->last = k0 == 0;"),
    ("gemm", "row[l] = row[l + 1];", ""),
    ("gemm", "size_t to = s->swap ? k ^ 1 : k;", "size_t to = k;"),
    ("gemm", "    if (ldd == 8) ampi_load_block_avx2(dst, ldd, src, t, lds, rows, cols);",
     "    if (ldd == 8) ampi_load_block_avx2(dst, ldd, src, t, lds, rows, cols < 8 ? 0 : cols);"),
    ("gemm", "    if (!(s->a.along_k || as_it_is) ||", "    if ("),
    ("gemm", "if (three) AMPI_##V##_MAC(c##i##2, x, b2);", "if (three) AMPI_##V##_MAC(c##i##2, x, b1);"),
    ("gemm", "if (three) c##i##2 = AMPI_##V##_CLEAN(c##i##2);", ""),
    ("gemm", "if (three) c##i##2 = AMPI_##V##_LOAD(old + i * ldo + 2 * AMPI_##V##_LANES);", ""),
    ("conv", "if (three) b2 = AMPI_##V##_LOAD(b + 2 * b_next);", "if (three) b2 = AMPI_##V##_LOAD(b + b_next);"),
    ("conv", "u->vectors == 3 ? g->wide : g->mr), low, high, q;", "g->mr), low, high, q;"),
    ("conv", "if (three) c##i##2 = AMPI_##V##_FMA(one, x, c##i##2);", ""),
    ("gemm", "u->vectors = ampi_div_up(columns, g->lanes);", "u->vectors = columns / g->lanes;"),
    ("gemm", "if (s->swap) s->k += s->k & 1u;", ""),
    ("gemm", "b->first = k0 == 0;", "b->first = k0 == 0 || k0 == p->kc;"),
    ("gemm", "s->c_dtype == AMP_F32 && ampi_c_is_matrix(s) && !s->bias && s->alpha == 1.0f",
     "s->c_dtype == AMP_F32 && s->part >= s->n && !s->bias"),
    ("gemm", "t[i] = s->beta != 0.0f ? -0.0f : 0.0f;", "t[i] = 0.0f;"),
    ("openmp", "b.b = shared + turn % 2 * p->floats", "b.b = shared"),
    ("openmp", "p->tiles_m > 2 && p->slots % p->tiles_m == 0", "p->tiles_m > 2 && p->slots > 1"),
    ("openmp", "return n / slots * slot + (slot < n % slots ? slot : n % slots);", "return n / slots * slot;"),
    ("openmp", "return step >= shared + floats ? step : floats;", "return step;"),
    ("openmp", "return step >= shared + floats ? step : floats;", "return step >= floats ? step : floats;"),
    ("openmp", "chunk < first[slot + 1]; chunk += step", "chunk + 1 < first[slot + 1]; chunk += step"),
    ("openmp", "+ first) * taps + t->a * kw + k, line", "+ first) * taps + k, line"),
    ("openmp", "padded + (i * step + t->a) * t->channels * f->pitch;", "padded + i * step * t->channels * f->pitch;"),
    ("openmp", "base->b_next = pairs ? (size_t)d->w.classes * d->width :", "base->b_next = pairs ? d->width :"),
    ("openmp", "const int bias = b->db && t.ch == 0 && t.a == 0;\n            ampi_taps u;",
     "const int bias = b->db && t.ch == 0;\n            ampi_taps u;"),
    ("openmp", "for (n = ampi_share(images, slots, i);", "for (n = ampi_share(images, slots, i) + (i > 0);"),
    ("openmp", "memory + (slot - part) * p->floats + p->at_b;", "memory + p->at_b;"),
    ("openmp", "for (k0 = 0; k0 < s->k + p->kc; k0 += p->kc)", "for (k0 = 0; k0 < s->k; k0 += p->kc)"),
    ("gemm", "v[l] = ampi_fma(hw, beta, add[l], alpha * t[l]);", "v[l] = beta * add[l] + alpha * t[l];"),
    ("gemm", "dst[l] = ampi_clean_nan(v[l]);", "dst[l] = v[l];"),
    ("gemm hostile", "if (p->ld < p->cols)", "if (p->ld + 1 < p->cols)"),
    ("hostile", "d + t * pitch < a_width;", "d + t * pitch <= a_width;"),
    ("hostile", "if (d + t * pitch <= -b_width) t +=", "if (d + t * pitch < -b_width) t +="),
    ("hostile", "w->data == o->data && ampi_dtype(w->dtype) == ampi_dtype(o->dtype))", "w->data == o->data)"),
    ("gemm", "2 * (p), flip ? odd : even, flip", "2 * (p), even, flip"),
    ("gemm", "((l) ^ u->flip) * AMPI_##V##_LANES, x##l);", "(l) * AMPI_##V##_LANES, x##l);"),
    ("gemm", "one.b.offset += i * batch->b;", ";"),
    ("openmp", "own.workspace_size = step;", ";"),
    ("gemm", "c = AMPI_##V##_ADD(c, AMPI_##V##_READ(x, t, at + 2 * lanes, lanes));", "c = AMPI_##V##_ADD(c, AMPI_##V##_READ(x, t, at + lanes, lanes));"),
    ("gemm", "ampi_add_rows(sum, dy, ampi_dtype(dy_dtype), row * out + o, out, ", "ampi_add_rows(sum, dy, ampi_dtype(dy_dtype), o, out, "),
    ("hostile", "i < count && i * stride < reach; i++", "i < count && i * stride + 1 < reach; i++"),
    ("hostile", "const size_t p_count = p_stride ? count : 1", "const size_t p_count = p_stride ? count - 1 : 1"),
    ("gemm", "(y->now + g * (y->lines - y->lag)) % y->lines;", "y->now % y->lines;"),
    ("gemm", "most = ampi_min_size(most, y->lines - ampi_thin_phase(y, g));", "(void)g;"),
    ("gemm", "? 0 : ampi_min_size((y->now - g * y->lag) / y->lines, y->blocks - 1);", "? 0 : y->blocks - 1;"),
    ("gemm", "line + (i + lag < n ? i + lag : i + lag - n)", "line + (i + lag < n ? i + lag : i)"),
    ("gemm", "u->a == u->room && (u->n % (AMPI_THIN_GROUP * y.groups) || y.lines * per < u->k)", "u->a == u->room && u->n % (AMPI_THIN_GROUP * y.groups)"),
    ("gemm", "|| y.lines * per < u->k)", "|| u->k % per)"),
    ("gemm", "(i * s.lda + ampi_thin_phase(y, (v + 1) * parts - 1) * 64", "(i * s.lda + ampi_thin_phase(y, v * parts) * 64"),
    ("gemm", "at, q, j, ampi_min_size(u->k, u->rows) - q);                        \\", "at, q, j, u->rows - q); \\"),
    ("gemm", "if (!ampi_thin_sums_are_normal(u->t, u->m * u->ldt)) return 0;", ""),
    ("gemm", "if (!ampi_words_are_normal(least, ampi_exponent_of(seen))) return 0;", "(void)least;"),
    ("gemm", "first = _mm512_maskz_srli_epi64(0xff, two, 48);", "first = _mm512_maskz_srli_epi64(0xff, two, 32);"),
    ("gemm", "#define AMPI_B16_EVEN(t, w) (seen = ampi_lesser_magnitude(seen, w),", "#define AMPI_B16_EVEN(t, w) ("),
    ("gemm", "s.sums = from->sums + i * row;", "s.sums = from->sums;"),
    ("gemm", "for (q = j < past ? done : 0; q + lanes", "for (q = done; q + lanes"),
    ("gemm", "return (64 - past) % 64 / size;", "return (64 - past) % 64 / size + 1;"),
    ("gemm", "if (row < u->rows) b = AMPI_##V##_READ", "b = AMPI_##V##_READ"),
    ("gemm", "if (u->flip) ampi_swap_pairs(room, s->m * ld);", "(void)u->flip;"),
    ("gemm", "part[r * 16 + j] = u->t[j * u->ldt + i + r];", "part[r * 16 + j] = u->t[j * u->ldt + r];"),
    ("gemm", "for (l = 0; l < ampi_min_size(u->k - q, lanes); l++)", "for (l = 0; l + 1 < ampi_min_size(u->k - q, lanes); l++)"),
    ("gemm", "s->alpha = s->k == 0 ? 1.0f : alpha;", "s->alpha = alpha;"),
    ("gemm", "s->b = ampi_matrix(b, b_dtype, tb ? n : k, tb ? k : n, ldb, tb);",
     "s->b = ampi_matrix(b, a_dtype, tb ? n : k, tb ? k : n, ldb, tb);"),
    ("gemm", "s->beta = accumulate ? 1.0f : 0.0f;\n    s->a = ampi_matrix(dy, dy_dtype, n, out, out, 0);",
     "s->a = ampi_matrix(dy, dy_dtype, n, out, out, 0);"),
    ("gemm", "b ? AMPI_IN : AMPI_UNUSED, AMPI_FLAT(out) }", "AMPI_UNUSED, AMPI_FLAT(out) }"),
    ("conv", "if (s->a.dtype != AMP_BF16) return 0;", ""),
    ("conv", "int64_t room = (int64_t)size + 2 * (int64_t)pad - (int64_t)dilation * (kernel - 1) - 1;",
     "int64_t room = (int64_t)size + 2 * (int64_t)pad - (int64_t)dilation * (kernel - 1);"),
    ("conv", "g.base_h = -c->s.pad_h; g.base_w = -c->s.pad_w;", "g.base_h = -c->s.pad_h; g.base_w = -c->s.pad_h;"),
    ("conv", "g.step_h = c->s.dilation_h; g.step_w = c->s.dilation_w;\n    return g;",
     "g.step_h = c->s.dilation_h; g.step_w = c->s.dilation_h;\n    return g;"),
    ("conv", "if (s->channels % s->groups != 0 || s->out_channels % s->groups != 0)",
     "if (s->channels % s->groups != 0)"),
    ("conv", "shift = v / s->stride - (v % s->stride < 0);", "shift = v / s->stride;"),
    ("conv", "return !s->back || *cls == 0;", "return 1;"),
    ("conv", "return (size_t)(right > -s->low ? right : -s->low);", "return (size_t)-s->low;"),
    ("conv", "d->class_rows = band + (size_t)(d->h.high - d->h.low);", "d->class_rows = band + (size_t)d->h.high;"),
    ("conv", "size_t k = d->swap ? i ^ 1u : i, ch = k / taps", "size_t k = i, ch = k / taps"),
    ("conv", "terms[n].from = terms[n - each].from + (uint32_t)from;", "terms[n].from = terms[n - each].from;"),
    ("conv", "terms[n++].from = (uint32_t)(d->h.back ? ch * d->rows * taps + tap : k);", "terms[n++].from = (uint32_t)k;"),
    ("conv", "int64_t last = ampi_min_i64(ampi_side_count(height, ch, qh) - top, rows);",
     "int64_t last = ampi_min_i64(ampi_side_count(height, ch, 0) - top, rows);"),
    ("conv", "int64_t first = top > 0 ? 0 : ampi_min_i64(-top, rows);", "int64_t first = 0;"),
    ("conv", "int64_t u0 = (int64_t)(task % d->bands * d->band), rh, rw;", "int64_t u0 = (int64_t)(task % d->bands), rh, rw;"),
    ("conv", "(size_t)i / d->k * d->rows * d->k + terms", "terms"),
    ("conv", "d.skips = d.h.parts * d.w.parts > 1 || (d.swap && d.k % 2 != 0);", "d.skips = d.h.parts * d.w.parts > 1;"),
    ("conv", "if (ampi_side_tap(s, r, a, &shift, &taken) && taken == cls) return 1;",
     "if (ampi_side_tap(s, r, a, &shift, &taken) && taken > cls) return 1;"),
    ("conv", "f->unit = swap && c->out_pixels % 2 != 0 ? 2 : 1;", "f->unit = 1;"),
    ("conv", "if (!f->swap || u->k % 2 == 0) {", "if (1) {"),
    ("conv", "u->k = 1;\n    u->first = 0;", "u->k = 1;"),
    ("conv", "u->first = n == 0;", "u->first = 1;"),
    ("conv", "for (i = 0; i < t->outs * f->ldt; i++) u->t[i] += 0.0f;\n", ""),
    ("conv", "size_t rows = bottom > pad_h ? ampi_min_size(bottom - pad_h, (size_t)c->s.height) : 0;",
     "size_t rows = bottom > pad_h ? ampi_min_size(bottom - pad_h - 1, (size_t)c->s.height) : 0;"),
    ("conv", "row = f->whole ? t->channels :", "row = f->whole ? 1 :"),
    ("conv", "q.lines = whole ? lines :", "q.lines = whole >= 0 ? lines :"),
    ("conv", "t.channels = (ch + 1) * f->c->cg / f->channel_tiles - t.ch;", "t.channels = f->c->cg - t.ch;"),
    ("conv", "t.o = o * f->c->og / f->out_tiles;", "t.o = o * f->c->og / f->out_tiles + (o > 0 ? 1 : 0);"),
    ("conv", "u->b_next = left > 1 ? step : next - i * step;", "u->b_next = lanes;"),
    ("conv", "u->b = b + v / row * next + i * step;", "u->b = b + v / row * next;"),
    ("conv", "const size_t apart = t->across ? t->segments : 1;", "const size_t apart = 1;"),
    ("conv", "t->across ? lanes : t->part * lanes;", "t->part * lanes;"),
    ("conv", "        u->b += u->vectors * d->isa.lanes;", "        u->b += 2 * d->isa.lanes;"),
    ("conv", "(size_t)(d->high[0] - u) * d->width / d->isa.lanes, base);", "(size_t)(d->high[0] - u), base);"),
    ("conv", "const int run = d->w.parts == 1 && d->w.classes == 1 &&", "const int run = d->w.parts == 1 &&"),
    ("conv", "run = d->w.parts == 1 && d->w", "run = d->w"),
    ("conv", "+ t->g * c->og + t->o + o) * p, p);", "+ t->g * c->og + o) * p, p);"),
    ("conv", "step = f->whole ? (size_t)c->s.stride_h : 1, lanes", "step = 1, lanes"),
    ("conv", "if (place >= high) high = place + 1;", "if (place > high) high = place;"),
    ("conv", "LIST(AMPI_LINE_BIAS, V) }", "}"),
    ("conv", "for (; i + 4 < n; i += 4) {", "for (; i + 2 < n; i += 4) {"),
    ("conv", "return !bad;", "return 1;"),
    ("conv", "if (d->skips) ampi_find_minus_zero(&d->found, u->t", "if (0) ampi_find_minus_zero(&d->found, u->t"),
    ("conv", "u.bias = bias ? bias + g * d->rows : NULL;\n    for", "u.bias = bias;\n    for"),
    ("conv", "if (d->skips) ampi_find_minus_zero(&d->found, t +", "if (0) ampi_find_minus_zero(&d->found, t +"),
    ("conv", "u.bias = bias ? bias + g * d->rows : NULL;\n    u.ldt", "u.bias = bias;\n    u.ldt"),
    ("conv", "if (d->swap && k % 2 != 0 && last + 1 == k) {", "if (0) {"),
    ("conv", "d->unit = swap && c->taps % 2 != 0 ? 2 : 1;", "d->unit = 1;"),
    ("gemm conv", "return e >= 1 && f >= 1 && e + f >= 142;", "return e >= 1 && f >= 1;"),
    ("conv", "return e >= 1 && ampi_words_are_normal(e, ", "return ampi_words_are_normal(e + 1, "),
    ("conv", "if (next > (c + 1) * taps || s->b.image->order) ampi_words_fill(stage, c + 1);", ""),
    ("conv", "a % (size_t)g->mul_h) * t->rows + a / (size_t)g->mul_h;", "a % (size_t)g->mul_h) * t->rows + a;"),
    ("conv", "if (to + count == nr) { j += nr; panel += stride; }", "if (count == nr) { j += nr; panel += stride; }"),
    ("conv", "memset(row + stage->n, 0, (2 * words - stage->n) * sizeof *row);", ""),
    ("conv", "memset(to, 0, (2 * words - n) * sizeof *to);", ""),
    ("conv", "const uint32_t low = x <= -32 ? 0 : x < 0 ? 0xffffffffu << -x : 0xffffffffu;",
     "const uint32_t low = 0xffffffffu;"),
    ("conv", "if (rest) u->bias = NULL;", ""),
    ("conv", "u->first = repeat == 0; u->last = 1;", "u->first = 1; u->last = 1;"),
    ("conv", "if (-shift > *low) *low = -shift;", ""),
    ("conv", "return place >= 0 && place < s->source ? place : -1;", "return place >= 0 ? place : -1;"),
    ("conv", "ampi_copy_rows((float*)d->result + at + whole, image, 1, tile, ldd, 1, images, count - whole);", ";"),
    # --- math
    ("ops", "return ampi_float(ampi_bits(y * scale) & ~ampi_mask(x < -87.3365402f));", "return y * scale;"),
    ("ops", "ampi_fma(hw, n, 1.90465432e-9f, ampi_fma(hw, n, -0.693147182f, x))", "ampi_fma(hw, n, -0.693147182f, x)"),
    ("ops", "float e = ampi_exp(hw, -ampi_abs(x));", "float e = ampi_exp(hw, -x);"),
    ("ops", "w = ampi_fma(hw, t, ampi_fma(hw, -t, a, ampi_fma(hw, -3.40625f, t, 1.0f)), t - 0.109375f);", "w = t - 0.109375f;"),
    ("ops", "p = ampi_fma(hw, p, w, 4.02952099f);", "p = ampi_fma(hw, p, w, 4.02951f);"),
    ("ops", "return ((q + 1) & 2) ? -c : c;", "return (q & 2) ? -c : c;"),
    ("ops", "ampi_select(ampi_mask(ampi_bits(a) < 0x3f200000u), p, 1.0f - 2.0f / large)", "1.0f - 2.0f / large"),
    # --- nn
    ("ops", "ampi_tiles(all.whole + all.skip) + (all.whole < n);", "ampi_tiles(all.whole + all.skip);"),
    ("ops", "tile.at = i > 0 ? ampi_min_size(next - AMPI_TILE, all->whole) : 0;", "tile.at = i > 0 ? next - AMPI_TILE : 0;"),
    ("ops", "(tile.at < all->whole ? ampi_min_size(next, all->whole) : all->n)", "ampi_min_size(next, all->n)"),
    ("ops", "AMPI_TILE - all->skip;\n    ampi_run tile;", "AMPI_TILE;\n    ampi_run tile;"),
    ("ops", "if (n > SIZE_MAX / 16)\n        return ampi_fail(log, AMP_ERR_ARGUMENT, \"%s: an operand", "if (0)\n"
     "        return ampi_fail(log, AMP_ERR_ARGUMENT, \"%s: an operand"),
    ("ops", "for (l = 0; i + l < n; l++) a[l] = ampi_add_square(hw, x[i + l], m[l], a[l]);", ""),
    ("ops", "ampi_min_size(count % AMPI_PARTS, (size_t)part)", "0"),
    ("ops", "value = old + value;", "value = old;"),
    ("ops hostile", "s->pad_h < 0 || s->pad_w < 0 || s->pad_h > s->kernel_h / 2 || s->pad_w > s->kernel_w / 2",
     "s->pad_h < 0 || s->pad_w < 0 || s->pad_h > s->kernel_h || s->pad_w > s->kernel_w"),
    ("ops", "p->oh = (int)(oh / p->sh) + 1;", "p->oh = (int)((oh + p->sh - 1) / p->sh) + 1;"),
    ("ops", "s.last = (int)(start + kernel < size ? start + kernel : size);\n    return s;\n}\n/* The windows o in [o0, o1) whose",
     "s.last = (int)(start + kernel < size ? start + kernel : size - 1);\n    return s;\n}\n/* The windows o in [o0, o1) whose"),
    ("ops", "if (!p->exclude_pad) return (float)((double)p->kh * (double)p->kw);", ""),
    ("ops", "ampi_mask(x > a) | (ampi_nan_mask(x) & ~ampi_nan_mask(a))", "ampi_mask(x > a)"),
    ("ops", "q->b[l] = b & ~(c | d);", "q->b[l] = b & ~c;"),
    ("ops", "m = ampi_select(c, even1[l], m);", ""),
    ("ops", "for (i = 0; i < n; i += AMPI_LANES) {\n            ampi_pool_quads_make(x + 2 * i, x + w + 2 * i, &q);\n"
     "            ampi_copy_floats(", "for (i = 0; i + 1 < n; i += AMPI_LANES) {\n"
     "            ampi_pool_quads_make(x + 2 * i, x + w + 2 * i, &q);\n            ampi_copy_floats("),
    ("ops", "_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), x, a, _CMP_NLE_UQ", "AMPI_ALL16, x, a, _CMP_GT_OQ"),
    ("ops", "for (i = 0; g && w > 2 * n && i < 2 * rows; i++) out[i * w + 2 * n] = 0.0f;", ";"),
    ("ops", "fill[i] = 2 * i < skip || 2 * i >= skip + count ? ampi_nine_least(t) : 0;", "fill[i] = 0;"),
    ("ops", "fresh ? v : AMPI_##V##_ADD(*first, v), part[0]", "fresh ? v : *first, part[0]"),
    ("ops", "if (r + 1 < p->h) memset(dx + row, 0, row);", ""),
    ("ops", "d->by_columns = !p->max && !ampi_pool_is_small(p, AMPI_LANES);", "d->by_columns = !p->max;"),
    ("ops", "g->real = ampi_nine_behind_##isa(skip);", "g->real = ampi_nine_behind_##isa(0);"),
    ("ops", "if (!ampi_nine_all_##isa(sound)) return;", ""),
    ("ops", "_mm512_mask_cmp_ps_mask(m, _mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _CMP_ORD_Q)",
     "_mm512_mask_cmp_ps_mask(m, _mm512_castsi512_ps(a), _mm512_castsi512_ps(a), _CMP_ORD_Q)"),
    ("ops", "ampi_nine_get_##isa(t, x, g + 1, &next, &next_b, sound);",
     "{ ampi_nine_lanes_##isa s = *sound; ampi_nine_get_##isa(t, x, g + 1, &next, &next_b, &s); }"),
    ("ops", "ampi_pool_backward_plane(&p, &words, &ring, dy, dy_dtype, x, x_dtype, dx, dx_dtype, from);", "(void)0;"),
    ("ops", "else if (k == 2 && !max) ampi_lines_windows_as_##isa(t, 0, single ? 1 : 2, 2,",
     "else if (k == 2 && !max) ampi_lines_windows_as_##isa(t, 0, single ? 1 : 2, 1,"),
    ("ops", "AMPI_FOR_TYPE(ampi_lines_turned_##isa, t, 0, 1, d,", "AMPI_FOR_TYPE(ampi_lines_turned_##isa, t, 0, 0, d,"),
    ("ops", "if (p->max || p->ow > AMPI_POOL_BLOCK || p->sw > p->kw) d->band = 0;",
     "if (p->max || p->sw > p->kw) d->band = 0;"),
    ("ops", "return _mm512_mask_mov_ps(none, ampi_first_x16(n), v);", "(void)none; (void)n; return v;"),
    ("ops", "*nan |= ampi_nan_mask(any[i]) != 0;", "*nan |= any[i] > 1e30f;"),
    ("ops", "if (!max && p->exclude_pad) ", "if (!max && p->exclude_pad && p->kh < 0) "),
    ("ops", "1.0 / sqrt(squares[l] / values + (double)p->eps)", "1.0 / sqrt(squares[l] / values)"),
    ("ops", "(float)(squares[l] / (values - 1.0))", "(float)(squares[l] / values)"),
    ("ops", "ampi_fma(AMPI_FMA_NATIVE, momentum, value, (1.0f - momentum) * running[c])",
     "ampi_fma(AMPI_FMA_NATIVE, momentum, running[c], (1.0f - momentum) * value)"),
    ("ops", "if (d > AMPI_TILE) v = ampi_view(x, xt, start + i, n, tile);", ""),
    ("ops", "v[l] = ampi_fma(hw, mean - x[i + l], b,", "v[l] = ampi_fma(hw, x[i + l] - mean, b,"),
    ("ops", "(n < 16 ? (1u << n) - 1u : 0xffffu)", "(n < 15 ? (1u << n) - 1u : 0xffffu)"),
    ("ops", "else _mm256_mask_storeu_epi16((uint16_t*)p + i, m, bits);", "else AMPI_PUT_HALF_X16((uint16_t*)p + i, bits);"),
    ("half", "0x000f000d000b0009,\n                                         0x0007000500030001", "0x000f000d000b0009,\n                                         0x0007000500030000"),
    ("ops", "_mm512_maskz_sub_pd(high, x.high", "_mm512_maskz_sub_pd((__mmask8)0xff, x.high"),
    ("ops", "return fabs(mean) < 1e30;", "return mean == mean;"),
    ("ops", "_mm512_maskz_extractf64x4_pd(0xf, a, 1)", "_mm512_maskz_extractf64x4_pd(0xf, a, 0)"),
    ("ops", "AMPI_EACH_X16(ampi_moment_to_x16, t, d - first, &acc, row + first * size, m[k],", "AMPI_EACH_X16(ampi_moment_to_x16, t, d - first, &acc, row, m[k],"),
    ("ops", "AMPI_EACH_X16(ampi_moment_to_rows_x16, t, d - first, &a, &b, from + done, mean_a,", "AMPI_EACH_X16(ampi_moment_to_rows_x16, t, d - first, &a, &b, from, mean_a,"),
    ("ops", "const size_t count = ampi_min_size(rows - (size_t)row, each);", "const size_t count = AMPI_LN_ROWS;"),
    ("ops", "_mm512_mul_ps(_mm512_fmadd_ps(v, b, g), k));\n    ampi_put_fetched_x16(t, dx, next", "_mm512_mul_ps(_mm512_fnmadd_ps(v, b, g), k));\n    ampi_put_fetched_x16(t, dx, next"),
    ("ops", "_mm512_fmadd_ps(v, gamma, beta)", "_mm512_fmadd_ps(v, beta, gamma)"),
    ("ops", "if (!p->wide || AMPI_LANES % p->stretch != 0) return 0;", "if (!p->wide || p->stretch > AMPI_LANES) return 0;"),
    ("ops", "AMP_ISA_AVX512 && ampi_dtype(a) == ampi_dtype(b);", "AMP_ISA_AVX512;"),
    ("ops", "_mm512_mask_max_ps(max->a, m, ampi_get_x16(t, x, i, m), max->a)",
     "_mm512_maskz_max_ps(AMPI_ALL16, ampi_get_x16(t, x, i, m), max->a)"),
    ("ops", "AMPI_MAX_X16(AMPI_MAX_X16(m.a, m.b), AMPI_MAX_X16(m.c, m.d))", "AMPI_MAX_X16(AMPI_MAX_X16(m.a, m.b), m.c)"),
    ("ops", "ampi_widen_x16(_mm512_maskz_mov_ps(m, e))", "ampi_widen_x16(e)"),
    ("ops", "_mm512_fmsub_ps(_mm512_loadu_ps(x + i), a.a, b.a)", "_mm512_fmadd_ps(_mm512_loadu_ps(x + i), a.a, b.a)"),
    ("ops", "memset(acc, 0, sizeof acc);\n    if (!direct && lds == n)", "memset(acc, 128, sizeof acc);\n    if (!direct && lds == n)"),
    ("ops", "if (global && last - plane == AMPI_LANES) {", "if (global) {"),
    ("ops", "ampi_load_f32(rows + l * lds, x, xt, (plane + l) * n + at, count);", "ampi_load_f32(rows + l * lds, x, xt, (plane + l) * n, count);"),
    ("ops", "0.0f + ampi_load_one(dy, dyt, plane, 0.0f)", "ampi_load_one(dy, dyt, plane, 0.0f)"),
    ("ops", "ampi_fms_x64(ampi_get_fetched_x64(AMP_F32, x, i), a, b)", "ampi_fma_x64(ampi_get_fetched_x64(AMP_F32, x, i), a, b)"),
    ("ops", "AMPI_EACH_X16(ampi_tile_sum_x16, AMP_F32, i - summed, acc, tile + summed);",
     "AMPI_EACH_X16(ampi_tile_sum_x16, AMP_F32, n - summed, acc, tile + summed);"),
    ("ops", "if (i < AMPI_EXP_BEHIND) continue;", "if (i < AMPI_EXP_BEHIND) { summed += 32; continue; }"),
    ("ops", "i < step && i + step < d; i++", "i < step && i + step + 1 < d; i++"),
    ("ops", "size_t at = ampi_div_up(d, g.lanes) * g.lanes;\n    for (; at > 0; at -= g.lanes)",
     "size_t at = g.lanes;\n    for (; at < d + g.lanes; at += g.lanes)"),
    ("ops", "{ first++; sum = 0.0; }", "first++;"),
    ("ops", "ampi_short_affine(z, z, sum, -target, factor,", "ampi_short_affine(z, z, sum, target, factor,"),
    ("ops", "a[i][l] = ampi_add_square(hw, v[l], m[l], 0.0);", "a[i][l] = ampi_add_square(hw, v[l], 0.0, 0.0);"),
    ("ops", "for (r = 0; r < rows; r++, dy += d, x += d) {\n        const ampi_wide g",
     "for (r = 1; r < rows; r++, dy += d, x += d) {\n        const ampi_wide g"),
    ("ops", "count = ampi_min_size(rows - (size_t)row, AMPI_SOFTMAX_ROWS), k;", "count = 1, k;"),
    ("ops", "count = ampi_min_size(n - row, AMPI_SOFTMAX_ROWS), k;", "count = 1, k;"),
    ("ops", "_mm512_mul_ps(ampi_get_x16(t, y, i, m), g)", "g"),
    ("ops", "_mm512_set1_ps(-87.3365402f), _CMP_NLT_UQ)", "_mm512_set1_ps(-100.0f), _CMP_NLT_UQ)"),
    ("ops", "_mm256_set1_ps(-87.3365402f), _CMP_LT_OQ", "_mm256_set1_ps(-100.0f), _CMP_LT_OQ"),
    ("ops", "c = ampi_andnot_twin(ampi_less_twin(ampi_same_twin(16.0f), c), v);", "c = v;"),
    ("ops", "return m < 8 ? _mm256_and_ps(x, _mm256_castsi256_ps(AMPI_V8_MASK(m))) : x;", "return (void)m, x;"),
    ("ops", "_mm256_add_pd(acc[0].low, acc[1].low), _mm256_add_pd(acc[0].high, acc[1].high)",
     "_mm256_add_pd(acc[0].low, acc[0].high), _mm256_add_pd(acc[1].low, acc[1].high)"),
    ("ops", "_mm256_blendv_ps(max[upper], v, _mm256_castsi256_ps(AMPI_V8_MASK(m)))", "v"),
    ("ops", "ampi_div_x64(ampi_if_plus_x64(x, one, e),", "ampi_div_x64(one,"),
    ("ops", "_mm512_set1_ps(0.390625f), _CMP_GE_OQ)", "_mm512_set1_ps(0.25f), _CMP_GE_OQ)"),
    ("ops", "_mm512_cmple_epi32_mask(v, *best), *age, one)", "_mm512_cmplt_epi32_mask(v, *best), *age, one)"),
    ("ops", "else *best = _mm512_add_epi32(*best, one);", ""),
    ("ops", "_mm512_castps_si512(before), 15)", "_mm512_castps_si512(before), 14)"),
    ("ops", "return (size_t)(p->ow / L) + 1;", "return (size_t)((p->ow - 1) / L) + 1;"),
    ("ops", "_mm256_andnot_si256(_mm256_cmpgt_epi32(v, *best), _mm256_add_epi32(*age, one))",
     "_mm256_andnot_si256(_mm256_cmpgt_epi32(v, *best), *age)"),
    ("ops", "else *best = _mm256_add_epi32(*best, one);", ""),
    ("ops", "_mm256_castps_si256(middle), 12)", "_mm256_castps_si256(middle), 8)"),
    ("ops", "_mm256_blendv_epi8(_mm256_set1_epi32(INT32_MIN), v, AMPI_V8_MASK(n))", "v"),
    ("ops", "p[n - 1] = (uint16_t)_mm_cvtsi128_si32(v);", "p[n - 1] = 0;"),
    ("ops", "_mm256_blendv_epi8(_mm256_sign_epi32(mag, u), _mm256_set1_epi32(0x7fffff00), nan)", "_mm256_sign_epi32(mag, u)"),
    ("ops", "_mm256_blendv_epi8(key, _mm256_set1_epi16(0x7fff), ampi_nan_y16(t, x))", "key"),
    ("ops", "v = _mm256_andnot_si256(_mm256_cmpeq_epi32(v, _mm256_set1_epi32(0x8000)), v);", ""),
    ("ops", "_mm256_blendv_epi8(b, d, *below)", "b"),
    ("ops", "for (i = 0; i < row; i += 16, sum += 16) {", "for (i = row; i < row; i += 16, sum += 16) {"),
    ("ops", "x.high = _mm256_blendv_pd(mean.high, x.high, on.high);", ""),
    ("ops", "return _mm256_fmsub_pd(d, _mm256_set1_pd(536870912.0), _mm256_mul_pd(d, _mm256_set1_pd(536870911.0)));", "return d;"),
    ("ops", "return _mm512_fmsub_pd(d, _mm512_set1_pd(536870912.0), _mm512_mul_pd(d, _mm512_set1_pd(536870911.0)));", "return d;"),
    ("ops", "r.a = t == AMP_BF16 ? ampi_get_quarters(p, p + 8) : _mm256_loadu_ps(p);", "r.a = _mm256_loadu_ps(p);"),
    ("ops", "r.b = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words));", "r.b = r.a;"),
    ("ops", "if (n > 8) words = _mm256_inserti128_si256(words, ampi_load_words_avx2(h + 8, n - 8), 1);", ""),
    ("ops", "if (n > 8) ampi_store_words_avx2(h + 8, n - 8, _mm256_extracti128_si256(words, 1));", ""),
    ("ops", "if (p->count == 16) ampi_ring_zip_avx2(t, dx, 0, 16, first, middle);", "if (p->count >= 15) ampi_ring_zip_avx2(t, dx, 0, 16, first, middle);"),
    ("ops", "g->choice[0] = f->choice[2][0]; g->choice[1] = f->choice[2][1];", "g->choice[0] = f->choice[1][0]; g->choice[1] = f->choice[1][1];"),
    ("ops", "ampi_lane_moment_avx2(acc + AMPI_LANES, x, mean + AMPI_LANES);", "ampi_lane_moment_avx2(acc + AMPI_LANES, x, mean);"),
    ("ops", "ampi_get_other_lanes8(t, x + next, i, n, w);", "ampi_get_other_lanes8(t, x, i, n, w);"),
    ("ops", "if (ampi_i < (n)) step(ampi_dtype(t), ampi_i, ampi_first_x16((n) - ampi_i), __VA_ARGS__);", "if (ampi_i < (n)) step(AMP_F16, ampi_i, ampi_first_x16((n) - ampi_i), __VA_ARGS__);"),
    ("ops", "w[1].low = _mm256_cvtps_pd(_mm_loadu_ps(from + 4));", "w[1].low = _mm256_cvtps_pd(_mm_loadu_ps(from + 12));"),
    ("ops", "if (n > 8) ampi_wide8_moment(acc + 1, w[1], mean[1], n - 8);", "ampi_wide8_moment(acc + 1, w[1], mean[1], 8);"),
    ("ops", "ampi_store_words_avx2(h + skip, first, skip ? _mm_srli_si128(a, 2) : a);", "ampi_store_words_avx2(h + skip, first, a);"),
    ("ops", "return ampi_fms_twin(x, ampi_same_twin(1.0f), y);", "return ampi_fms_twin(x, ampi_same_twin(1.0000001f), y);"),
    ("half", "cut = _mm256_adds_epi16(cut, _mm256_and_si256(words, _mm256_set1_epi16(1)));", ""),
    ("half", "cut = _mm256_adds_epi16(cut,", "cut = _mm256_add_epi16(cut,"),
    ("half", "if ((unsigned)_mm256_movemask_epi8(_mm256_add_epi16(mag, _mm256_set1_epi16(0x80))) & 0xaaaaaaaau)", "if (0)"),
    ("half", "u = _mm256_or_si256(u, _mm256_and_si256(_mm256_cmpgt_epi16(mag, _mm256_set1_epi16(0x7f80)), quiet));", "(void)mag; (void)quiet;"),
    ("ops", "_mm512_set1_ps(12.9f), _CMP_LT_OQ)", "_mm512_set1_ps(14.0f), _CMP_LT_OQ)"),
    ("ops", "return ampi_if_plus_x64(x, ampi_sub_x64(one, p), p);", "return ampi_sub_x64(one, p);"),
    ("ops", "_mm512_cmpgt_epi32_mask(u, _mm512_setzero_si512()) | ampi_nan_x16(u)", "_mm512_cmpgt_epi32_mask(u, _mm512_setzero_si512())"),
    ("ops", "ampi_mul_x64(ampi_clamp_x64(x, 16.0f), AMPI_SPREAD_X64(0.398942280f))", "ampi_mul_x64(x, AMPI_SPREAD_X64(0.398942280f))"),
    ("ops", "r = ampi_add_x64(rest, ampi_exp_r_x64(square, n, -2.0f)), q = ", "r = ampi_exp_r_x64(square, n, -2.0f), q = "),
    ("ops", "ampi_put_x32(t, p, i + 32, x.c, x.d);", "ampi_put_x32(t, p, i + 32, x.d, x.c);"),
    ("ops", "odd = _mm512_set_epi64(0x003f003d003b0039, 0x0037003500330031,", "odd = _mm512_set_epi64(0x003f003d003b0039, 0x0037003500330021,"),
    ("ops", "ampi_fnma_x64(p, q, ampi_add_x64(p, p))", "ampi_fnma_x64(p, q, p)"),
    ("ops", "s = ampi_if_plus_x64(z, other, tail);", "s = other;"),
    ("ops", "case AMP_TANH: return ampi_mul_x64(dy, ampi_fnma_x64(s, s, one));",
     "case AMP_TANH: return ampi_mul_x64(dy, ampi_fma_x64(s, s, one));"),
    ("ops", "ampi_wide_fma(&dot, g, ampi_widen_x16(_mm512_mul_ps(_mm512_sub_ps(ampi_get_x16(t, x, i, m), mean), invstd)));", ""),
    ("ops", "const float* next = k + 1 < rows ? x + q->d : x;", "const float* next = x;"),
    ("ops", "if (!usual) ampi_ln_measure(x, AMP_F32, 0, q->d, q->eps, mean + k, invstd + k);", ""),
    ("ops", "AMP_F32, n, &sum, next + i, y + i, x + i, g, b,", "AMP_F32, n, &sum, next, y + i, x + i, g, b,"),
    ("ops", "ampi_ln_line_x16(t, i, m, b, g, &sum, &dot);", "ampi_ln_line_x16(t, i, m, a, g, &sum, &dot);"),
    ("ops", "        b.x = (const char*)b.x + n * size;", ""),
    ("ops", "ampi_ln_columns(q, row, start + i, ampi_tile_size(n, i)", "ampi_ln_columns(q, row, start, ampi_tile_size(n, i)"),
    ("ops", "totals[3] = ampi_wide_total(b.dot);", "totals[3] = ampi_wide_total(a.dot);"),
    ("ops", "if (dx) ampi_ln_row_backward(q, row, dx, dxt);", ""),
    ("ops", "return ampi_round_up(ampi_div_up(rows, 32), AMPI_SHORT);", "return ampi_round_up(ampi_div_up(rows, 16), AMPI_SHORT);"),
    ("ops", "past = ampi_min_size(row + ampi_ln_run_rows(q->rows), q->rows);", "past = q->rows;"),
    ("ops", "ampi_ln_add_run(sums, run, 2 * ampi_padded(n));", "ampi_ln_add_run(sums, run, ampi_padded(n));"),
    ("ops", "{ ampi_ln_add_run(sums, run, width); }", "{ ampi_ln_add_run(sums, run, width / 2); }"),
    ("ops", "room + (1 + (size_t)(i / rows) % places) * width", "room + (size_t)(i / rows) % places * width"),
    ("ops", "exec->workspace && exec->workspace_size >= bytes;", "exec->workspace;"),
    ("ops", "start + i, ampi_tile_size(n, i), db + i, p->accumulate", "start + i, ampi_tile_size(n, i), dg + i, p->accumulate"),
    ("ops", "&b, kept, mean_a, mean_b, to, next);", "&b, kept, mean_a, mean_a, to, next);"),
    ("ops", "&a, &b, mean_a, mean_b, to, next, &c, &e, coming,", "&a, &b, mean_a, mean_a, to, next, &c, &e, coming,"),
    ("ops", "ampi_sum_keep_rows_x16(t, i, m, c, e, x, after, ahead, kept);", "ampi_sum_keep_rows_x16(t, i, m, c, e, x, 0, ahead, kept);"),
    ("ops", "(1u << (n + 1u) / 2u) - 1u", "(1u << n / 2u) - 1u"),
    ("ops", "_mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0)", "_mm512_set_epi64(11, 3, 10, 2, 9, 1, 0, 8)"),
    ("ops", "mean_b = ampi_load_lanes_x16(t, mean + AMPI_LANES);", "mean_b = ampi_load_lanes_x16(t, mean);"),
    ("ops", "if (count > 1 && usual && ampi_simd() >= AMP_ISA_AVX2) {",
     "if (count > 1 && ampi_simd() >= AMP_ISA_AVX2) {"),
    ("ops", "ampi_y[6] = g; ampi_y[7] = h;", "ampi_y[6] = g; ampi_y[7] = g;"),
    ("ops", "sums[i] = old[i] + sums[i];", "sums[i] = old[i];"),
    ("ops", "skip = (size_t)((offset + start) & 3u);", "skip = (size_t)(start & 3u);"),
    ("ops", "bits + skip, p, 1.0f / (1.0f - p),", "bits + skip, p, 1.0f,"),
    ("ops", "\"x\", x, x_dtype, AMPI_OUT | none, AMPI_FLAT(rows * d)", "\"x\", x, x_dtype, AMPI_OUT | AMPI_NULL, AMPI_FLAT(rows * d)"),
    ("ops", "ampi_log_one(&loss, smoothing - 1.0f, z - max);", "ampi_log_one(&loss, -1.0f, z - max);"),
    ("ops", "if (label - i < n) ampi_fma_one(", "if (label < n) ampi_fma_one("),
    ("ops", "v[i] = (uint16_t)(first + i);", "v[i] = (uint16_t)(first + (i & 1022));"),
    ("ops", "table[i + l] = 1.0f;", "table[i + l] = -1.0f;"),
    ("ops", "{ return l < p->per_group ? l : 0; }", "{ return l < p->per_group ? 0 : 0; }"),
    ("ops", "minus_zero[i * AMPI_LANES + l] = -0.0f;", "minus_zero[i * AMPI_LANES + l] = 0.0f;"),
    ("ops", "AMPI_BY_HAND(ampi_bn_rows, sums + c * count * p->stretch,", "AMPI_BY_HAND(ampi_bn_rows, sums,"),
    ("ops", "training = ampi_bn_trains(s, training);", ""),
    ("ops", "return (float)(scale * (double)weight / (double)n);", "return (float)(scale * (double)weight);"),
    ("ops", "if (labels[i] < 0 || (size_t)labels[i] >= classes)", "if (labels[i] < 0 || (size_t)labels[i] > classes)"),
    ("ops", "*loss = (float)(ampi_parts_total(parts) / (double)n);\n    return AMP_OK;\n}\n\n/* dlogits",
     "*loss = (float)(ampi_parts_total(parts));\n    return AMP_OK;\n}\n\n/* dlogits"),
    # --- policy
    ("policy", "if (level == AMP_O0 || ampi_op_is_loss(op)) return AMP_RULE_FP32;",
     "if (level == AMP_O0) return AMP_RULE_FP32;"),
    ("policy", "if (level == AMP_O3) return AMP_RULE_LOW;", "if (level == AMP_O2) return AMP_RULE_LOW;"),
    ("policy", "d.level == AMP_O3 ? d.master_weights == 1 : d.master_weights != AMP_ZERO", "d.master_weights != AMP_ZERO"),
    ("policy", "if (d->white_count && d->black_count)", "if (0)"),
    ("policy", "for (i = 0; i < d.black_count; i++) ampi_policy_put(&out, d.black[i], AMP_RULE_FP32, AMP_REASON_BLACK);",
     "for (i = 1; i < d.black_count; i++) ampi_policy_put(&out, d.black[i], AMP_RULE_FP32, AMP_REASON_BLACK);"),
    ("policy", "if (out && count < capacity) out[count] = (amp_op)i;", "if (out && count <= capacity) out[count] = (amp_op)i;"),
    # --- scaler
    ("scaler optim", "if (n >= AMPI_LEAD_MIN && data) lead =", "if (data) lead ="),
    ("scaler", "v[l] = x[i + (size_t)l] * factor;", "v[l] = x[i] * factor;"),
    ("scaler", "ampi_inf_bits(t) - 1, c[k].offset + i, &c[k]);", "ampi_inf_bits(t) - 1, c[0].offset + i, &c[k]);"),
    ("scaler", "k < AMPI_ABREAST; k++, x += AMPI_CHUNK * size", "k < AMPI_ABREAST; k++, x += AMPI_BLOCK * size"),
    ("scaler", "ampi_squares_turn_##name(x + i + k * AMPI_CHUNK, s[k]);", "ampi_squares_turn_##name(x + i + k, s[k]);"),
    ("scaler", "ampi_square_ahead_x32(t, x, i + 3 * AMPI_CHUNK, d);", "ampi_square_ahead_x32(t, x, i + 2 * AMPI_CHUNK, d);"),
    ("scaler", "end->tensor == c->tensor", "c->tensor == c->tensor"),
    ("scaler", "&& end->n == AMPI_CHUNK && ampi_pass", "&& ampi_pass"),
    ("scaler", "&& ampi_pass_limit(pass, c->tensor, t) == ampi_inf_bits(t) - 1) {", ") {"),
    ("scaler", "return t == AMP_BF16 ? ampi_tree_avx512(a) +", "return t != AMP_BF16 ? ampi_tree_avx512(a) +"),
    ("scaler", "for (k = 0; k < c->count; k++) ampi_check_chunk(context, &c[k]);", "ampi_check_chunk(context, c);"),
    ("scaler", "#define AMPI_SMALLEST_SCALE 0x00200000u", "#define AMPI_SMALLEST_SCALE 0x00100000u"),
    ("scaler", "!no_min && !no_max && d->min_scale > d->max_scale", "0"),
    ("scaler", "r->interval = interval > INT32_MAX - row->late ? INT32_MAX : interval + row->late;", "r->interval = interval;"),
    ("scaler", "grown > (double)rule->max) state->scale = rule->max;", "grown >= (double)rule->max) state->scale = rule->max / 2;"),
    ("scaler", "grown < AMPI_FLT_OVERFLOW || rule->guard == AMP_GUARD_NONE", "rule->guard == AMP_GUARD_NONE || 1"),
    ("scaler", "    state->tracker = 0;\n    if (rule->refill", "    if (rule->refill"),
    ("scaler", "if (rule->refill == AMP_REFILL_GROWTH) state->hysteresis_left = rule->hysteresis;", ""),
    ("scaler", "state->tracker >= rule->interval) ampi_scaler_grow", "state->tracker > rule->interval) ampi_scaler_grow"),
    ("scaler", "    state->consecutive_skips = 0;\n    if (rule->refill != ", "    if (rule->refill != "),
    ("scaler", "state->consecutive_skips > rule->max_skips) hit = 2;", "state->consecutive_skips >= rule->max_skips) hit = 2;"),
    ("scaler", "state->tracker = rule->start;\n    if (state->hysteresis_left", "if (state->hysteresis_left"),
    ("scaler", "if (state->scale < rule->min) state->scale = rule->min;", ""),
    ("scaler", "    state->found_inf = 0;\n    return hit;", "    return hit;"),
    ("scaler", "return t == AMP_F16 ? 0x7c00u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;",
     "return t == AMP_F16 ? 0x7c01u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;"),
    ("scaler", "if (to == AMP_F16) return (float)product >= 65520.0f;", "if (to == AMP_F16) return (float)product > 65520.0f;"),
    ("scaler", "if (c->inf + c->nan == 0) c->first = base + i;", "c->first = base + i;"),
    ("scaler", "for (; i < n; i++) y[i] = x[i] * factor;", "for (; i + 1 < n; i++) y[i] = x[i] * factor;"),
    ("scaler", "ampi_check(&t, NULL, unscaled ? 1.0f : s->state.inverse, &found);",
     "ampi_check(&t, NULL, s->state.inverse, &found);"),
    ("scaler", "if (!s->scaled) ampi_scaler_use_scale(&s->state);", ""),
    ("scaler", "if (done & AMPI_UNSCALED)\n", "if (0)\n"),
    ("scaler", "if (ampi_scaler_record(s, found, place) && s->state.inverse != 1.0f) {",
     "ampi_scaler_record(s, found, place); if (s->state.inverse != 1.0f) {"),
    ("scaler", "if (!found->found_inf || s->rule.ignore_overflow) return 1;", "if (!found->found_inf) return 1;"),
    ("scaler", "crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)))", "crc = (crc >> 1) ^ (0xEDB88321u & (0u - (crc & 1u)))"),
    ("scaler", "left >= 0 && left <= r->hysteresis", "left >= 0"),
    ("scaler", "value[k] = i < 4 ?", "value[k] = i < 5 ?"),
    ("scaler", "info->last_tensor != c->tensor) {", "!info->found_inf) {"),
    ("scaler", "memset(info->last_name, 0, sizeof info->last_name);", ""),
    ("scaler", "info->first_tensor = info->last_tensor = -1;", "info->first_tensor = -1;"),
    ("scaler", "found->found_inf && all->first_tensor < 0", "found->found_inf && !all->found_inf"),
    ("scaler", "s->desc.growth_factor = s->desc.backoff_factor = 0.0f;", ""),
    ("scaler", "is_static && d->hysteresis != 0", "0"),
    ("scaler", "type ^ (begin + x.count * ampi_type_size(x.dtype))) - ampi_mix(type ^ begin)", "type ^ x.count)"),
    ("scaler", "(uint64_t)ampi_dtype(x.dtype) << 61", "0"),
    ("scaler", "if (seen * AMP_SCALER_SAMPLES >= slot * n)", "if (slot < AMP_SCALER_SAMPLES)"),
    ("scaler", "if (!*all || unscaled == ampi_tensors_key(t)) return AMP_OK;", "return AMP_OK;"),
    ("optim", "seen->key == ampi_tensors_key(t) ? seen", "1 ? seen"),
    ("optim", "if (!(entry->done & (AMPI_UNSCALED | AMPI_STEPPED))) ampi", "if (!(entry->done & AMPI_UNSCALED)) ampi"),
    ("optim", "if (part && (part->done & AMPI_UNSCALED)) part->done |= AMPI_STEPPED;", ""),
    ("optim", "if (part && (part->done & AMPI_UNSCALED)) part->done", "if (part) part->done"),
    ("checkpoint", "if (s && ampi_scaler_ready(s) != AMP_OK)\n", "if (0)\n"),
    ("optim", "if (d.logger) s->logger = *d.logger;", ""),
    # --- optim
    ("optim", "part = ampi_min_size(n - k, ampi_block_to_line(c, i + k, p->m));", "part = ampi_block_to_line(c, i + k, p->m);"),
    ("optim", "if (!report.applied) report.grad_norm = ampi_double(AMPI_INF64);", ""),
    ("optim", "if (made.desc.logger) made.logger = *made.desc.logger;", ""),
    ("optim", "if (after < 0) return (double)(t + 1) / ((double)warmup + 1.0);",
     "if (after < 0) return (double)t / ((double)warmup + 1.0);"),
    ("optim", "return after >= whole ? floor_factor\n", "return after > whole ? 0.0\n"),
    ("optim", "d->kind == AMP_ADAMW ? 0.01f : 0.0f", "d->kind == AMP_ADAM ? 0.01f : 0.0f"),
    ("optim", "AMPI_REFUSE_PARAM(moments > 1 && !p->v, AMP_ERR_ARGUMENT, \"v is NULL, but this optimizer needs it\");", ""),
    ("optim", "int first = t == 0;", "int first = 0;"),
    ("optim", "u->buf = d->nesterov ? d->momentum : 1.0f;", "u->buf = d->momentum;"),
    ("optim", "ampi_pow_int((double)d->beta1, t + 1)", "ampi_pow_int((double)d->beta1, t)"),
    ("optim", "int64_t t = o->state.step - o->state.frozen_steps[group];", "int64_t t = o->state.step;"),
    ("optim", "if (ampi_is_off(&o->groups[i].lr)) o->state.frozen_steps[i]++;", ""),
    ("optim", "if (s->frozen_steps[i] < 0 || s->frozen_steps[i] > s->step)", "if (s->frozen_steps[i] > s->step)"),
    ("optim", "if (s->step < 0 || s->step >> 62)", "if (s->step >> 63)"),
    ("checkpoint", "    memcpy(o->state.frozen_steps, restored->frozen_steps, sizeof o->state.frozen_steps);\n", ""),
    ("checkpoint", "return x->is_optional && text[strspn(text, \"0\")] == 0;", "return x->is_optional;"),
    ("checkpoint", "return x->is_optional && text[strspn(text, \"0\")] == 0;", "return 0;"),
    ("checkpoint", "|| steps > step) return 0;", ") return 0;"),
    ("checkpoint", "return text || !x->is_optional ? text : x->is_float", "return text ? text : x->is_float"),
    ("checkpoint", "if (x->is_state && !ampi_field_left_out(x, text)) crc =", "if (x->is_state && !x->is_optional) crc ="),
    ("optim", "u->r2 = (float)(1.0 / sqrt(correction2));", "u->r2 = 1.0f;"),
    ("optim", "if (d->kind == AMP_ADAMW) u->decay =", "if (d->kind == AMP_ADAM) u->decay ="),
    ("optim", "if (d->kind != AMP_ADAM) u->l2 = 0.0f;", ""),
    ("optim", "u->mult = o->desc.maximize ? -mult : mult;", "u->mult = mult;"),
    ("optim", "return coefficient < 1.0 ? coefficient : 1.0;", "return coefficient;"),
    ("optim", "(double)o->desc.clip_norm / (norm + 1e-6)", "(double)o->desc.clip_norm / norm"),
    ("optim", "(float)((double)factor * coefficient)", "(float)coefficient"),
    ("optim", "if (step.w_sum > 0.0 && step.direction_sum > 0.0)", "if (step.direction_sum > 0.0)"),
    ("optim", "    if (k > 4) _mm256_maskstore_ps(p, mask, x);", "    if (k > 5) _mm256_maskstore_ps(p, mask, x);"),
    ("optim", "    if (k > 4) return _mm256_maskload_ps(p, mask);", "    if (k > 5) return _mm256_maskload_ps(p, mask);"),
    ("optim", "for (; i < n; i += 8) ampi_##name##_turn_##rest(", "if (i < n) ampi_##name##_turn_##rest("),
    ("scaler", "if (n > 24) b = _mm256_inserti128_si256(b, ampi_load_words_avx2(x + 24, n - 24), 1);", ""),
    ("scaler", "_mm512_maskz_loadu_ps(ampi_first_x16(n - 16), x + 16)", "_mm512_maskz_loadu_ps(ampi_first_x16(n - 17), x + 16)"),
    ("scaler", "i < AMPI_SCAN_LANES; i += 8, n -= ampi_min_size(n, 8))", "i < AMPI_SCAN_LANES - 8; i += 8, n -= ampi_min_size(n, 8))"),
    ("ops", "x.n % AMPI_LANES == 0 && y != x.data\n", "x.n % AMPI_LANES == 0\n"),
    ("ops", "enum { AMPI_PARTED_SOUND = -0x7e00 };", "enum { AMPI_PARTED_SOUND = -0x7eff };"),
    ("ops", "_mm256_add_epi16(_mm256_add_epi16(words, words), _mm256_set1_epi16(-0x7f00))", "_mm256_add_epi16(_mm256_add_epi16(words, words), _mm256_set1_epi16(-0x7fff - 1))"),
    ("optim", "ampi_update_kernel(step->kind)(w, g, p->m ? p->m + i : NULL, p->v ? p->v + i : NULL, n, u);\n"
     "        if (p->low) ampi_store_f32(p->low, p->low_dtype, i, w, n);",
     "ampi_update_kernel(step->kind)(w, g, p->m ? p->m + i : NULL, p->v ? p->v + i : NULL, n, u);"),
    ("optim", "ampi_optimizer_validate(&d) != AMP_OK || ampi_groups_validate(&d) != AMP_OK", "ampi_optimizer_validate(&d) != AMP_OK"),
    ("checkpoint", "    while (kept > 0 && ((unsigned char)name[kept] & 0xc0) == 0x80) kept--;\n", ""),
    ("hostile", "    feholdexcept(&floats);\n    for (at = 0; at < n; at += CHUNK) {", "    fegetenv(&floats);\n    for (at = 0; at < n; at += CHUNK) {"),
    ("checkpoint", "amp_result r = ampi_optimizer_check_rates(&o, c->saver);", "amp_result r = ((void)o, AMP_OK);"),
    ("checkpoint", "amp_result r = ampi_params_validate(&copy, o->params, o->count);", "amp_result r = ((void)copy, AMP_OK);"),
    ("optim", "    o->state.step++;\n}\n", "    if (!o->desc.clip_norm) o->state.step++;\n}\n"),
    ("optim", "u->frozen = ampi_is_off(&g->lr);", "u->frozen = 0;"),
    # --- backend
    ("train", "if (!t->last.applied && bytes) memcpy(now, saved, bytes);", ""),
    ("train", "t->loss_scale = window ? &t->scaler.state.scale_in_use : &t->scaler.state.scale;", "t->loss_scale = NULL;"),
    ("train", "return *flag != 0.0f ? amp_scaler_report_overflow(&t->scaler) : AMP_OK;", "return AMP_OK;"),
    ("train", "t->scaler.scaled = t->scaler.recorded = t->scaler.list_count = 0;", ""),
    # --- model
    ("model", "m->nodes[i].tag == v.id >> AMPI_VALUE_BITS ? i", "1 ? i"),
    ("model", "words[4 + i] = (uint32_t)m->nodes[n->inputs[i]].tag + 1;", "(void)m;"),
    ("model", "if (x->layer.channels != y->layer.channels || x->layer.height != y->layer.height\n", "if (0\n"),
    ("model", "n->loss_weight = d.weight == 0.0f ? 1.0f : d.weight;", "n->loss_weight = 1.0f;"),
    ("model", "n->pin_dtype == AMP_DTYPE_DEFAULT || dtype < n->pin_dtype", "n->pin_dtype == AMP_DTYPE_DEFAULT || dtype > n->pin_dtype"),
    ("model", "else if (n->has_region && !ampi_op_is_transparent(l->op) && !ampi_op_is_loss(l->op)) {",
     "else if (n->has_region && !ampi_op_is_transparent(l->op)) {"),
    ("model", "if (n->layer.rule == AMP_RULE_LOW && m->policy.cast_back) n->visible = AMP_F32;", ""),
    ("model", "n->layer.compute_dtype = first == second ? first : AMP_F32;", "n->layer.compute_dtype = first;"),
    ("model", "if (wanted != AMP_DTYPE_DEFAULT && wanted != user->layer.compute_dtype) agree = 0;", ""),
    ("model", "if (m->nodes[i].reads[0] == source && m->nodes[i].layer.storage_dtype == dtype) return i;", ""),
    ("model", "if (ampi_is_norm(n)) return is_bias ? 0.0f : 1.0f;", "if (ampi_is_norm(n)) return 1.0f;"),
    ("model", "return u * sqrtf(6.0f / (float)(n->fan_in + n->fan_out));", "return u * sqrtf(6.0f / (float)n->fan_in);"),
    ("model", "values[i] = ampi_initial_weight(n, is_bias, ampi_stream(m, index), at + i);",
     "values[i] = ampi_initial_weight(n, is_bias, ampi_stream(m, index), i);"),
    ("model", "ampi_count_bytes(&at, 2 * (size_t)m->desc.batch);", "ampi_count_bytes(&at, (size_t)m->desc.batch);"),
    ("model", "if (op != AMP_OP_SOFTMAX_CROSS_ENTROPY && d.smoothing != 0.0f)", "if (0)"),
    ("model", "if (!ampi_is_utf8(name)) {", "if (0) {"),
    ("model", "size_t at = offsetof(amp_backend, open);", "size_t at = sizeof *b;"),
    ("model", "return b->name != NULL;", "return 1;"),
    # --- train
    ("train", "p.grad_factor = (float)(1.0 / ((double)m->desc.accumulate * (double)m->comm.size));",
     "p.grad_factor = (float)(1.0 / (double)m->desc.accumulate);"),
    ("train", "p.accumulate = m->micro > 0;", "p.accumulate = 0;"),
    ("train hostile", "    feholdexcept(&floats);      /* an overflow is data here, not a trap */", "    fegetenv(&floats);"),
    ("train model", "if (!part || !n->needs_temp[j]) return AMP_OK;", "return AMP_OK;"),
    ("train", "&& told.attempts <= m->desc.max_replays", "&& info->attempts < m->desc.max_replays"),
    ("train", "if (!p->training) {\n        if (from == to) return AMP_OK;", "if (0) {\n        if (from == to) return AMP_OK;"),
    ("train", "ampi_data(m, n->layer.op == AMP_OP_GELU ? x : n)", "ampi_data(m, n)"),
    ("train", "offset = each * (uint64_t)m->comm.rank;", "offset = 0;"),
    ("train", "if (row[k] > row[best]) best = k;", "if (row[k] >= row[best]) best = k;"),
    ("train hostile", "if (some[i] < 0 || some[i] >= classes)", "if (some[i] >= classes)"),
    ("train", "if (b->on_device && m->backend->asynchronous) return AMP_OK;", "if (b->on_device) return AMP_OK;"),
    ("train", "if (m->saved) ampi_copy_running(m, 1);", "ampi_copy_running(m, 1);"),
    ("train", "m->training.passes -= (uint64_t)(m->micro - 1);", ""),
    ("train", "    if (r != AMP_OK && !last) return ampi_abandon_step(m, r);", ""),
    ("train", "if (!any && m->desc.accumulate > 1)\n", "if (0)\n"),
    ("train", "sum += (double)m->nodes[m->losses[i]].loss_weight * (double)value;", "sum += (double)value;"),
    ("train", "if (l->op == AMP_OP_BATCH_NORM && !m->nodes[i].frozen &&", "if (l->op == AMP_OP_BATCH_NORM &&"),
    ("train", "if (!n->on_loss_path || !n->wants_grad) continue;", "if (!n->on_loss_path || !n->needs_grad) continue;"),
    ("train", "if (frozen < m->param_count && ampi_is_frozen_now(m, p)) p->grad = NULL;",
     "if (ampi_is_frozen_now(m, p)) p->grad = NULL;"),
    ("train", "m->grad_list[i].count = p->grad ? p->count : 0;", ""),
    ("train", "return ampi_check_thawed(m, what);", "return AMP_OK;"),
    ("train", "if (!ampi_scale_usable(&info->scale_before))\n", "if (0)\n"),
    ("train", "else if (o->inf_count + o->nan_count == 0 && m->comm.size == 1)", "else if (0)"),
    ("train", "if (info && ampi_step_was_made(r)) *info = told;", "if (info) *info = told;"),
    ("train", "int spread = o->last_tensor != o->first_tensor;", "int spread = o->last_tensor > 1;"),
    ("train", "return r == AMP_OK || r == AMP_ERR_OVERFLOW; }", "return r == AMP_OK; }"),
    # --- checkpoint
    ("checkpoint", "if (r != AMP_OK && replaced == 0) remove(temporary);", ""),
    ("checkpoint", "stat(path, &st) == 0 && !S_ISREG(st.st_mode)", "stat(path, &st) == 0 && S_ISDIR(st.st_mode)"),
    ("checkpoint", "ampi_put64(length, header_bytes);", "ampi_put64(length, header_bytes + 8);"),
    ("checkpoint", "if (e->begin != f->data_bytes)", "if (e->begin > f->data_bytes)"),
    ("checkpoint", "if (fgetc(f->stream) != EOF)", "if (0)"),
    ("checkpoint", "if (n < 2 || n > AMPI_FILE_MAX_HEADER)", "if (n > AMPI_FILE_MAX_HEADER)"),
    ("checkpoint", "if (j->end - j->at < 4) return ampi_json_fail(j, \"an escape is cut off\");", ""),
    ("checkpoint", "if (!twice) twice = ampi_sort_names(names + tensors, texts, sizeof *names);", ""),
    ("checkpoint", "ampi_field_float(f, \"beta2\", d->beta2);", ""),
    ("checkpoint", "m ? m->training.passes : 0);", "0);"),
    ("checkpoint", "ampi_params_write_low(o->params, o->count);", ""),
    ("checkpoint", "uint32_t group = (uint32_t)o->params[i].group;", "uint32_t group = 0;"),
    ("checkpoint", "if (!c->scaler && !text) return AMP_OK;", "if (!c->scaler) return AMP_OK;"),
    ("checkpoint", "if (n == 0 || n + 3 > sizeof(ampi_state_name))", "if (n == 0 || n + 2 > sizeof(ampi_state_name))"),
    ("checkpoint", "if (c->scaler) *c->scaler = restored->scaler;", ""),
    ("checkpoint", "if (ampi_model_state_is_moment(c->model, i)) continue;", ""),
    ("checkpoint", "if (!found) { ampi_names_add(missing, name); continue; }", "if (!found) continue;"),
    ("checkpoint", "if (r == AMP_OK && missing.count > 0)", "if (r == AMP_OK)"),
    ("checkpoint", "for (; i < f->count; i++) f->list[i].is_setting = 1;", ""),
    ("checkpoint", "if (r == AMP_OK) ampi_checkpoint_tell(c, f, &before);", "ampi_checkpoint_tell(c, f, &before);"),
    ("checkpoint", "if (code != AMP_OK) snprintf(m->error", "snprintf(m->error"),
    ("checkpoint", "return r == AMP_OK ? amp_model_sync_params(m) : r;", "return r;"),
    ("checkpoint", "if (s->count == 0)", "if (0)"),
    ("checkpoint", "theirs[kept].tensor.dtype = ((const ampi_file_entry*)found)->type->dtype;", ""),
    ("checkpoint", "if (strlen(text) != 2 * n) return 0;", ""),
    ("checkpoint", "for (crc = ~crc; n >= 8; p += 8, n -= 8) {", "for (crc = ~crc; n > 8; p += 8, n -= 9) {"),
    ("checkpoint", "^ table[1][high >> 16 & 0xffu] ^", "^ table[1][high >> 8 & 0xffu] ^"),
    ("checkpoint", "if (e->has_crc && (crc", "if (0 && (crc"),
    ("checkpoint", "if (!found) continue;", "if (!found) break;"),
    ("checkpoint", "if (!ampi_hex_number(t->value, &e->crc))", "if (!ampi_hex_number(t->value, &e->crc)) e->has_crc = 0;\n        if (0)"),
    ("checkpoint", "else if (strncmp(texts[i].key, AMPI_CRC_KEY, AMPI_CRC_KEY_LENGTH) == 0)", "else if (0)"),
    ("checkpoint", "if (crc && strcmp(crc,", "if (0 && strcmp(crc,"),
    ("checkpoint", "if (x->is_state) crc = ampi_crc32(crc, x->text", "if (x->is_state && k < 2) crc = ampi_crc32(crc, x->text"),
    ("checkpoint", "for (i = 0; i < ampi_group_count(o); i++) o->groups[i].lr = restored->group_lr[i];", ""),
    ("optim", "if (!ampi_lr_is_valid(&g->lr, 1))", "if (!ampi_lr_is_valid(&g->lr, 0))"),
    ("optim", "if (!ampi_lr_is_valid(&g->weight_decay, 1))", "if (0)"),
    ("optim", "{ return o->desc.group_count > 0 ? o->desc.group_count : 1; }", "{ return o->desc.group_count; }"),
    ("optim", "moments > 1 && p->m == p->v, AMP_ERR_ARGUMENT", "0, AMP_ERR_ARGUMENT"),
    ("optim", "int moments = ampi_param_frozen(o, p) ? 0 : ampi_moment_count(&o->desc);", "int moments = ampi_moment_count(&o->desc);"),
    ("optim", "case 1: return ampi_array_of(p->low, p->count * sizeof(uint16_t), 1);", "case 1: return ampi_array_of(p->low, floats, 1);"),
    ("optim", "return ampi_array_of(moments > 1 ? p->v : NULL, floats, 1);", "return ampi_array_of(NULL, floats, 1);"),
    ("optim", "child += (size_t)ampi_place_before(heap[child], heap[child + 1]);", "child++;"),
    ("optim", "while (n == AMPI_PLACES);", "while (0);"),
    ("optim", "            last = place[i];\n", "            last = place[0];\n"),
    ("scaler", "if (s.to > end[k]) { end[k] = s.to; owner[k] = *b; }", "{ end[k] = s.to; owner[k] = *b; }"),
    ("scaler", "if (s.from < end[!s.written]) return 1;", "if (s.from < end[0]) return 1;"),
    ("scaler", "    s.written = id < count;\n", ""),
    ("scaler", "    const amp_result r = ampi_tensors_apart(s, t, place);", "    const amp_result r = AMP_OK;"),
    ("scaler", "    r = ampi_into_apart(s, dst, src, place);\n", ""),
    ("optim", "    r = ampi_optimizer_check_rates(o, place);", "    r = AMP_OK;"),
    ("optim", "    if (!own.log) s->logger = *logger;", ""),
    ("checkpoint", "if (s->failed || fseek(s->stream, 8, SEEK_SET) == 0) { ampi_put_header(s, c); return; }", "return;"),
    ("checkpoint", "c->crcs[i] = ampi_put_data(", "c->crcs[0] = ampi_put_data("),
    # --- report
    ("report", "if (e < own->min_exponent) s->subnormals++;", "if (e <= own->min_exponent) s->subnormals++;"),
    ("report", "if (a > AMPI_INF64) { s->nans++; return; }", ""),
    ("report", "s->histogram[e < 0 ? 0 : e >= AMP_STATS_BINS ? AMP_STATS_BINS - 1 : e]++;",
     "s->histogram[e < 0 ? 0 : e > AMP_STATS_BINS ? AMP_STATS_BINS - 1 : e]++;"),
    ("report", "& 0x007fffffu) > last) e--;", "& 0x007fffffu) >= last) e--;"),
    ("report", "if (!add) memset(out, 0, sizeof *out);", ""),
]

# Of code that runs on some processors only: a flag of /proc/cpuinfo, and rows as above.
SPECIAL = {
    "avx512_bf16": [
        ("conv", "return s->part >= s->n && s->lines == 0;", "return s->part >= s->n;"),
        ("conv", "const size_t term = i ^ 1u;\n        if (rank[term] == SIZE_MAX)", "const size_t term = i;\n        if (rank[term] == SIZE_MAX)"),
        ("conv", "p->order[n ^ 1u] = (uint32_t)rank[term];", "p->order[n ^ 1u] = (uint32_t)n ^ 1u;"),
        ("conv", "p->k = (c->og + c->og % 2) * p->taps;", "p->k = c->og * p->taps + c->og * p->taps % 2;"),
        ("conv", "else *step = shift - last;", "else *step = -1;"),
        ("conv", "if (odd) AMPI_STORE_RELAXED(bad, 1);", ""),
        ("conv", "room < f.floats || !ampi_conv2d_normal(x, c->x_count, b->dy, c->y_count)) return 0;",
         "room < f.floats) return 0;"),
        ("conv", "u.step = f->pitch * (size_t)s->stride_h;", "u.step = f->pitch;"),
        ("conv", "u.first = ch == 0;", "u.first = 1;"),
        ("conv", "t + (n - n0) * each + (p - p0) * 32,", "t + (p - p0) * 32,"),
        ("conv", "if (n % 4) ampi_transpose_avx512(dst + (n - 4) * 32", "if (0) ampi_transpose_avx512(dst + (n - 4) * 32"),
        ("conv", "const size_t cols = d->image->cols, step = (size_t)d->image->mul_h * d->pitch;",
         "const size_t cols = d->image->cols, step = d->pitch;"),
        ("conv", "| ampi_spread_inside(d, high, a, b) << AMPI_STRIP;", "| ampi_spread_inside(d, low, a, b) << AMPI_STRIP;"),
        ("conv", "(y >= 0 && y < g->height && x >= 0 && x < g->width)) rows |= 1u << i;",
         "(y >= 0 && y < g->height && x > 0 && x < g->width)) rows |= 1u << i;"),
        ("conv", "if (!d.skips || !d.found) break;", "break;"),
        ("conv", "    if (whole > 0) ampi_find_infinite(&d->found,", "    if (whole < 4) ampi_find_infinite(&d->found,"),
        ("conv", "        ampi_find_infinite(&d->found, line, ampi_round_up(part, 4));\n", ""),
        ("conv", "ampi_min_size(2 * i + second, all - 1)", "ampi_min_size(2 * i + second, all - 2)"),
        ("conv", "column % wide * (int64_t)d->phase +", ""),
        ("conv", "u->t2 = t + (high.y * cols + high.x) * d->ldt + t_next;", "u->t2 = t + (high.y * cols + high.x) * d->ldt;"),
        ("conv", "32, src + n - 4, n, 4, 0);    /* may overlap */", "32, src + n - 5, n, 4, 0);"),
        ("conv", "ampi_copy_rows(dst + i * 32, 0, 1, src + i, 0, n, 1, 16);",
         "ampi_copy_rows(dst + i * 32, 0, 1, src + i, 0, n, 1, 15);"),
        ("conv", "if (part == n) ampi_load_f32(line, w->data, w->dtype, at, rows * n);",
         "if (part > 8) ampi_load_f32(line, w->data, w->dtype, at, rows * n);"),
        ("conv", "_mm512_mask_storeu_ps(to + n, m, _mm512_permutex2var_ps(low, odd, high));",
         "_mm512_mask_storeu_ps(to + n, m, _mm512_permutex2var_ps(low, even, high));"),
        ("conv", "const __m512 high = ampi_get_x16(t, from, 16, (__mmask16)(here >> 16));",
         "const __m512 high = ampi_get_x16(t, from, 16, (__mmask16)here);"),
        ("conv", "f->lines = (size_t)((c->out_h - 1) * c->s.stride_h + c->s.kernel_h);", "f->lines = (size_t)c->out_h + 4;"),
        ("conv", "stage + i * size + top * f->pitch, f->pitch, x +", "stage + i * size, f->pitch, x +"),
        ("conv", "u.t = slot + i * t->rows * (size_t)s->kernel_w * 16;", "u.t = slot;"),
        ("conv", "const size_t lanes = c->og <= 8 ? 8 : 16, plane", "const size_t lanes = 8, plane"),
        ("conv", "if (bias) ampi_bias_store(b, t.g * c->og, c->og,", "if (0) ampi_bias_store(b, t.g * c->og, c->og,"),
        ("openmp", "u.x = stage + i * size + t->a * f->pitch;", "u.x = stage + i * size;"),
        ("conv", "_mm512_mask_storeu_epi32((float*)dst + at + 16, (__mmask16)(even >> 16),",
         "_mm512_mask_storeu_epi32((float*)dst + at + 16, 0,"),
        ("conv", "if (hit) AMPI_STORE_RELAXED(found, 1);", ""),
        ("conv", "at += stride - inside, inside = 0) {", "at += stride) {"),
        ("conv", "memset(line, 0, (size_t)(first - y) * t->pitch * sizeof *line);", ""),
        ("conv", "memset(line, 0, (size_t)(last - first - inside) * t->pitch * sizeof *line);", ""),
        ("conv", "at += s->part_stride - s->lines * s->line;", ""),
        ("conv", "if (x0 == 0 && mul == 1 && g->mul_w == 1 &&", "if (x0 <= 0 && mul == 1 && g->mul_w == 1 &&"),
        ("conv", "rows = (i + 1 == t->slabs ? t->end : g->rows) - row + more;", "rows = g->rows - row + more;"),
        ("conv", "& _mm512_cmplt_epi32_mask(from, _mm512_set1_epi32((int)n));", ";"),
        ("conv", "if (step == 2 && t != AMP_F32) {", "if (step == 2) {"),
        ("gemm", "e >= 1 && f >= 1 && e + f >= 142", "e >= 1 && f >= 1 && e + f >= 141"),
        ("gemm", "e >= 1 && f >= 1 && e + f >= 142", "f >= 1 && e + f >= 142"),
        ("gemm", "? 2 * AMPI_GEMM_SHALLOW : AMPI_GEMM_LOW;", "? AMPI_GEMM_LOW : AMPI_GEMM_LOW;"),
        ("gemm", "other = ampi_lesser_magnitude(other, lower);", ""),
        ("gemm", "least = ampi_lesser_magnitude(least, upper);", ""),
        ("gemm", "rest = ampi_lesser_magnitude(ampi_lesser_magnitude(rest, x), y);", ""),
        ("gemm", "e >= 1 && f >= 1 && e + f >= 142", "e >= 1 && e + f >= 142"),
        ("gemm", "pairs = ampi_gemm_isa_pairs();", "pairs = g;"),
        ("gemm conv", "f->c_dtype != AMP_F32 && columns == 32 && !f->spread", "f->c_dtype != AMP_F32 && columns == 32"),
        ("gemm", "f->c_dtype != AMP_F32 && columns == 32 && !f->spread", "f->c_dtype != AMP_F32 && columns > 16 && !f->spread"),
        ("gemm", "return g->staged ? ampi_round_up((k + 1) / 2, 4) : ampi_words(g, k);", "return (k + 1) / 2 - 1;"),
        ("gemm", "if (g->staged) room.words = 0;", ""),
        ("gemm", "&& b->k0 + b->kc <= s->a.length;", ";"),
        ("gemm", "first % sizeof(float) == 0 && s->a.ld % 2 == 0", "first % sizeof(float) == 0"),
        ("gemm", "g = ampi_gemm_block(g, s, &b); ", "ampi_gemm_block(g, s, &b); "),
        ("gemm", "b->least_a = ampi_min_unsigned(b->least_a, ampi_least_exponent(u->a, u->rs, rows, u->k));", ";"),
        ("gemm", "b->least_b = ampi_min_unsigned(b->least_b, least);", "(void)least;"),
        ("gemm", "size_t i = b->few ? 0 : q - q % ampi_block_group(g, s, b);", "size_t i = b->few ? 0 : q;"),
        ("gemm", "for (; i < (b->few ? b->panels : q + 1); i++) ampi_turn", "for (; i <= q; i++) ampi_turn"),
        ("gemm", "if (b->whole && b->packed < b->nc) ampi_pack", "if (b->packed > b->nc) ampi_pack"),
        ("gemm", "_mm512_dpbf16_ps(c, (__m512bh)(x), (__m512bh)(b))", "_mm512_dpbf16_ps(c, (__m512bh)(x), (__m512bh)(x))"),
        ("gemm", "if (!s->normal) b->least_a = ampi_min_unsigned(b->least_a, least);", ""),
        ("gemm", "__m512i y = 2 * w + 1 < k ? _mm512", "__m512i y = 2 * w < k ? _mm512"),
        ("gemm", "s->b.ld, ampi_min_size(s->b.runs - at, step),", "s->b.ld, ampi_min_size(s->k - at, step),"),
        ("gemm", "size_t length = ampi_min_size(kc, s->b.length - k0);", "size_t length = kc;"),
        ("gemm", "size_t length = ampi_min_size(kc, s->a.length - k0); ", "size_t length = kc; "),
    ],
    "amx_bf16": [
        ("gemm", "_tile_dpbf16ps(1, 4, 7);", "_tile_dpbf16ps(1, 4, 6);"),
        ("gemm", "dst + (2 * l + 1) * ldd, AMPI_WORD(low, low)", "dst + (2 * l + 1) * ldd, AMPI_WORD(high, low)"),
        ("gemm", "ampi_is_direct(s) && rows % 16 == 0 && columns % 16 == 0", "ampi_is_direct(s) && columns % 16 == 0"),
        ("gemm", "ampi_is_direct(s) && rows % 16 == 0 && columns % 16 == 0", "ampi_is_direct(s) && rows % 16 == 0"),
        ("gemm", "memset((char*)dst + n * sizeof(uint16_t), 0, words * sizeof *dst - n * sizeof(uint16_t));", ""),
        ("gemm", "s->a.along_k && rows % 16 == 0 && kc % 32 == 0", "s->a.along_k && kc % 32 == 0"),
        ("gemm", "s->a.along_k && rows % 16 == 0 && kc % 32 == 0", "s->a.along_k && rows % 16 == 0"),
        ("gemm", "u.old = k0 + k > 0 ? t + j : NULL;", "u.old = k > 0 ? t + j : NULL;"),
        ("gemm", "(j == 0 || width < 32) && l < u.taps", "j == 0 && l < u.taps"),
        ("gemm", "src + i * s->b.ld + 2 * done, length - 2 * done", "src + i * s->b.ld, length - 2 * done"),
        ("gemm conv", "if (w + 16 < words)\n            _mm512_storeu_si512(dst + w + 16", "if (w + 32 < words)\n            _mm512_storeu_si512(dst + w + 16"),
        ("conv", "for (v = 0; v < taps && 32 * v < n; v++, from", "for (v = 0; v + 1 < taps && 32 * v < n; v++, from"),
        ("conv", "memset(to + k * d->plane + i * d->class_size, 0, d->pitch * sizeof *to);", ";"),
        ("conv", "if (d->uses[1][q])", "if (q == 0)"),
        ("conv", "d->order[i] = (unsigned char)n;", "d->order[i] = (unsigned char)i;"),
        ("conv", "y = y0 + p / d->pitch * (size_t)d->h.parts;", "y = y0 + p / d->pitch;"),
        ("conv", "rh < (size_t)ampi_min_i64(d->h.parts, d->h.result - (int64_t)u0 * d->h.parts); rh++",
         "rh < (size_t)d->h.parts; rh++"),
        ("conv", "x = (q % d->classes_w + sw - pad_w % sw) % sw;", "x = q % d->classes_w;"),
        ("conv", "(y % sh * d->classes_w + x % sw) * d->class_size", "(y % sh + x % sw) * d->class_size"),
        ("conv", "- (size_t)-d->w.low * sizeof(float);", ";"),
        ("conv", "u.a_skip = (16 * taps - u.taps) * 64;", "u.a_skip = 15 * taps * 64;"),
        ("conv", "y = y0 + p / d->pitch * (size_t)d->h.parts;", "y = p / d->pitch * (size_t)d->h.parts;"),
        ("conv", "u.old = old || i > 0 || j > 0 ? u.t : NULL;", "u.old = i > 0 || j > 0 ? u.t : NULL;"),
        ("conv", "u.a_skip = image - u.taps * 64;", "u.a_skip = image - d->steps * 64 + 64;"),
        ("conv", "f.add = d->accumulate ? f.c : NULL;", "f.add = NULL;"),
        ("conv", "ampi_words_of_pairs(to, 16, turned, pairs);", ";"),
    ],
}


def here(flag):
    try:
        return " " + flag + " " in open("/proc/cpuinfo").read().replace("\n", " ")
    except OSError:
        return False


TABLE += [row for flag in SPECIAL if here(flag) for row in SPECIAL[flag]]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
JOBS = int(os.environ.get("JOBS", "2"))


class Refused(Exception):
    """By the compiler."""


class Header:
    """What receives the faults, its tests, and how both are built. amp.h here."""
    name = "amp.h"
    table = TABLE
    tests = "half gemm conv ops policy scaler optim model train checkpoint report alloc hostile".split()
    seconds = 60    # of the processor, for one test: a busy machine makes no hang
    out = os.path.join(ROOT, "build", "mutants")
    compiler = os.environ.get("CC", "gcc")
    # Compiles in half the time of -O2; without the second, gcc leaves vzeroupper out and SSE code after AVX crawls.
    flags = ["-std=c99", "-w", "-Og", "-fexpensive-optimizations"]
    test_flags = ["-std=c99", "-w", "-O2", "-DTEST_STOP=1"]

    def compile(self, *arguments):
        done = subprocess.run([self.compiler, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise Refused(done.stderr[:400])

    def build_tests(self):
        for test in self.tests + ["openmp"]:
            self.compile(*self.test_flags, *self.threads(test), "-c", os.path.join(ROOT, "tests", "test_%s.c" % test), "-o",
                         os.path.join(self.out, test + ".o"))

    def build(self, folder, likely):
        """The implementation with its fault, in this folder."""
        self.compile(*self.flags, *self.threads(likely), "-x", "c", "-DAMP_IMPLEMENTATION", "-c", os.path.join(folder, self.name), "-o",
                     os.path.join(folder, "impl.o"))

    def link(self, test, folder, likely, program):
        self.compile(os.path.join(self.out, test + ".o"), os.path.join(folder, "impl.o"), "-o", program, "-lm",
                     *self.threads(test))

    def threads(self, tests):
        return ["-fopenmp"] if tests == "openmp" else []

    def order(self, likely):
        if likely == "openmp":
            return [likely]
        first = [w for w in likely.split() if w in self.tests]
        return first + [t for t in self.tests if t not in first]


def failing_test(header, folder, likely):
    """The first test that fails with the implementation in this folder, and how; None if all pass."""
    for name in header.order(likely):
        program = os.path.join(folder, "test_" + name)
        header.link(name, folder, likely, program)
        done = subprocess.run(["sh", "-c", "ulimit -t %d; exec \"$0\"" % header.seconds, program], cwd=folder,
                              capture_output=True, text=True, errors="replace",
                              env=dict(os.environ, OMP_WAIT_POLICY="passive"))
        os.remove(program)
        if done.returncode:
            ended = {signal.SIGKILL: "hangs", signal.SIGXCPU: "hangs"}
            failed = re.findall(r"^FAILED: (\w+)", done.stdout, re.M)
            return failed[0] if failed else "test_%s %s" % (name, ended.get(-done.returncode, "crashes"))
    return None


def try_one(header, number, text, row):
    likely, pattern, replacement = row
    folder = os.path.join(header.out, str(number))
    os.makedirs(os.path.join(folder, "build"), exist_ok=True)
    with open(os.path.join(folder, header.name), "w") as f:
        f.write(text.replace(pattern, replacement))
    try:
        header.build(folder, likely)
        found = failing_test(header, folder, likely)
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
    rows, rotten = [], 0
    for row in header.table[::every]:
        if text.count(row[1]) != 1:
            rotten += 1
            print("stands %d times in %s: %s" % (text.count(row[1]), header.name, row[1]))
            continue
        place = text.index(row[1])
        room = ([""] + [name for start, name in tags if start < place])[-1]
        if not words or any(w in room + " " + row[0] + " " + row[1] for w in words):
            rows.append((room, text.count("\n", 0, place) + 1, row))
    return rows, rotten


def main(header):
    text = open(os.path.join(ROOT, header.name)).read()
    rows, rotten = choose(header, text)
    os.makedirs(header.out, exist_ok=True)
    header.build_tests()
    began = time.time()
    state, why = try_one(header, "none", text, ("", "", ""))
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
    return 0 if rows and caught >= MINIMUM and not counts.get("does not compile") else 1


if __name__ == "__main__":
    sys.exit(main(Header()))
