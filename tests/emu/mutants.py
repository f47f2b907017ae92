"""mutants.py [1/N] [WORD...] - the faults of ../mutants.py in amp_cuda.cuh; the tests run on the emulator.

In a row, 750 or 900 beside the tests' names means code for that compute capability; else it is 800. CXX: the compiler,
default g++. The sanitizers take part: accesses beyond an allocation and on odd addresses count as seen.
"""
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True
import mutants

TABLE = [
    # --- base
    ("nn", "cudaGetLastError();      /* an error that does not stick is not reported twice */", ""),
    ("model", "if (10 * major + minor < 75)", "if (10 * major + minor < 65)"),
    ("model", "if (c->records[i].graph) cudaGraphExecDestroy(c->records[i].graph);", "{}"),
    ("model", "cudaError_t e = cudaEventSynchronize(slot->done);", "cudaError_t e = cudaSuccess;"),
    ("model", "cudaError_t e = cudaEventSynchronize(slot->done);",
     "cudaError_t e = cudaEventQuery(slot->done);\n    if (e) e = cudaEventSynchronize(slot->done);"),
    ("model", "c->next_slot = (c->next_slot + 1) % AMPI_CUDA_SLOTS;", ""),
    ("model", "slot->bytes < bytes) {", "slot->bytes == 0) {"),
    ("model", "if (slot->data) cudaFreeHost(slot->data);", ""),
    ("model", "if (e == cudaSuccess) e = cudaEventRecord(slot->done, stream);", ""),
    ("model", "return r == AMP_OK ? ampi_cpu_convert(host, host_dtype, slot->data, src_dtype, n, exec) : r;",
     "return r;"),
    ("model", "if (r != AMP_OK || !exec || !exec->workspace) return r;", "return r;"),
    ("half", "r == AMP_OK && n > 0 && i < count; i++)", "r == AMP_OK && n > 0 && i + 1 < count; i++)"),
    ("gemm", "size_t skip = (size_t)(0u - start) & 15u;", "size_t skip = 0;"),
    ("model", "cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault,",
     "cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice,"),
    ("half", "&& a.devicePointer == p));", "&& a.devicePointer));"),
    ("gemm model", "|| exec->workspace_size - skip < bytes) return NULL;", ") return NULL;"),
    ("half", "return (h & 0x7fffu) > 0x7c00u ? ampi_float(ampi_half_widen(h)) : ampi_ptx_f32_from_f16(h);",
     "return ampi_ptx_f32_from_f16(h);"),
    ("half", "return (u & 0x7fffffffu) > 0x7f800000u ? ampi_half_bits(u) : ampi_ptx_f16_from_f32(f);",
     "return ampi_ptx_f16_from_f32(f);"),
    ("half", "if (i + 8 <= n && ((uintptr_t)p & 15u) == 0) {\n        ampi_d_set4",
     "if (i + 8 <= n) {\n        ampi_d_set4"),
    ("half", "if (i + (size_t)j < n) r.w[j] = ((const uint32_t*)p)[j];",
     "if (i + (size_t)j <= n) r.w[j] = ((const uint32_t*)p)[j];"),
    ("half", "if (i + (size_t)j < n) ((uint16_t*)p)[j] =", "if (i + (size_t)j <= n) ((uint16_t*)p)[j] ="),
    ("nn", "AMPI_D float ampi_d_larger(float a, float b) { return b > a ? b : a; }",
     "AMPI_D float ampi_d_larger(float a, float b) { return b > a || b != b ? b : a; }"),
    ("nn", "    __syncthreads();      /* the last sum has been read by all */\n", ""),
    ("nn", "warp < T / 32; warp++) v[k] +=", "warp < T / 64; warp++) v[k] +="),
    ("nn", "    if (T == 32) return v;\n    __syncthreads();", "    if (T == 32) return v;"),
    # --- half
    ("half", "return (size_t)gridDim.x * AMPI_CUDA_TILE;", "return (size_t)gridDim.x * AMPI_CUDA_TILE * 2;"),
    ("half", "    if (from == to) return;      /* a copy keeps all bits */\n", ""),
    ("half", "ampi_d_fetch8(r[u], m.a, m.at, i + (size_t)(u * AMPI_CUDA_SECOND), m.n);",
     "ampi_d_fetch8(r[u], m.a, m.at, i + (size_t)(u * AMPI_CUDA_SECOND - u), m.n);"),
    ("half", "last = ((uint64_t)1 << 62) - 1u;", "last = ~(uint64_t)0;"),
    ("half", "skip == 2 ? w[j + 2] : w[j + 3]", "skip == 2 ? w[j + 2] : w[j + 2]"),
    ("half", "d.seed, d.offset + at);", "d.seed, d.offset + i);"),
    ("half", "atomicAdd((unsigned long long*)d.saturated, hits)",
     "(void)atomicExch((unsigned long long*)d.saturated, hits)"),
    ("half", '{ "desc.saturated", d->saturated, AMP_F32, AMPI_NULL, AMPI_FLAT(2) } };', "};"),
    # --- gemm
    ("nn", "while ((uint64_t)1 << (v.shift - 31) < d) v.shift++;", ""),
    ("gemm conv", "if (carry) d.low -= low;", ""),
    ("conv", "d.middle += step.middle + carry;", "d.middle += step.middle;"),
    ("conv", "w.x = (int)position.low * o.mul_w + o.base_w;", "w.x = (int)position.low * o.mul_w + o.base_h;"),
    ("conv", "if (!o.divided) w.at += (size_t)((int64_t)w.y * o.width + w.x);",
     "if (!o.divided) w.at += (size_t)((int64_t)w.y * o.height + w.x);"),
    ("conv", "if (position.high >= o.images)", "if (position.high > o.images)"),
    ("conv", "row * o.div_h.d == y && ", ""),
    ("conv", "return inside && y < o.height && x < o.width;", "return inside && y < o.height && x <= o.width;"),
    ("gemm", "t.row = first + inside % rows;", "t.row = inside % rows;"),
    ("conv", "c.whole = p.part == p.n ||", "c.whole = 1 ||"),
    ("gemm", "ampi_d_store8(p.c, p.c_dtype, c.at, c.at + c.count, v)",
     "ampi_d_store8(p.c, p.c_dtype, c.at, c.at + 8, v)"),
    ("gemm", "size_t at = z * p.bias_stride;", "size_t at = 0; (void)z;"),
    ("gemm", "ampi_activate(1, AMP_GELU_TANH, x)", "ampi_activate(1, AMP_GELU, x)"),
    ("gemm", "for (int turn = 0; turn < 8; turn++)", "for (int turn = 1; turn < 8; turn++)"),
    ("gemm", "__fmul_rn(p.alpha, ampi_clean_nan(v[l]))", "ampi_clean_nan(v[l])"),
    ("gemm", "if (p.beta != 0.0f) {", "if (p.beta != 0.0f && p.pieces == 1) {"),
    ("gemm", "if (p.beta != 0.0f) {", "{"),
    ("gemm", "for (int l = 0; l < 8; l++) v[l] = ampi_clean_nan(v[l]);\n    ampi_d_c_store8", "ampi_d_c_store8"),
    ("gemm", "((piece * p.batch + z) * p.m + i) * p.n", "((z * p.pieces + piece) * p.m + i) * p.n"),
    ("gemm", "row + j, row + p.n, v);", "row + j, row + p.n + 8, v);"),
    ("gemm", "for (uint32_t s = 1; s < p.pieces; s++)", "for (uint32_t s = 1; s + 1 < p.pieces; s++)"),
    ("gemm", "ampi_d_load8(next, p.sums + s * piece,", "ampi_d_load8(next, p.sums + (p.pieces - s) * piece,"),
    ("gemm", "v[l + 4] = odd ? mine : got;", "v[l + 4] = odd ? got : mine;"),
    ("gemm", "float* tile = shared + (s & 1u) * 2", "float* tile = shared + 0 * 2"),
    ("gemm", "const uint32_t xh = is_b ? q / 2 : q & 1u, kh = is_b ? q & 1u : q / 2;",
     "const uint32_t xh = q / 2, kh = q & 1u;"),
    ("gemm", "f.position < o.cols && f.run", "f.run"),
    ("gemm", "f.position < o.cols && f.run + u * below < o.channels", "f.position < o.cols"),
    ("gemm", "(u & 1u) * 32)", "(u & 1u) * 0)"),
    ("gemm 750", "low[2] = { a[0], a[1] }, high[2] = { a[2], a[3] }",
     "low[2] = { a[0], a[2] }, high[2] = { a[1], a[3] }"),
    ("gemm", "right[j][0] = r[0]; right[j][1] = r[1];", "right[j][0] = r[1]; right[j][1] = r[0];"),
    ("gemm", "= sum[next][q / 4][q % 4];\n        __syncwarp();", "= sum[next][q / 4][q % 4];"),
    ("gemm 900", "sum[4 * q + 3]);\n        }\n        __syncwarp();\n", "sum[4 * q + 3]);\n        }\n"),
    ("hopper 900", "make_float2(v.z, v.w);\n        }\n        __syncwarp();\n", "make_float2(v.z, v.w);\n        }\n"),
    ("gemm", "            ampi_ptx_cp_async_wait<AMPI_CUDA_RING - 2>();\n            __syncthreads();",
     "            ampi_ptx_cp_async_wait<AMPI_CUDA_RING - 2>();"),
    ("gemm", "ampi_ptx_cp_async_wait<AMPI_CUDA_RING - 2>", "ampi_ptx_cp_async_wait<AMPI_CUDA_RING - 1>"),
    ("gemm", "    __syncthreads();      /* the last slot has been read */\n", ""),
    ("gemm", "(uintptr_t)data % 16 == 0", "(uintptr_t)data % 8 == 0"),
    ("gemm", " && v->ld % 8 == 0", ""),
    ("gemm", " && stride % 8 == 0;", ";"),
    ("gemm", "(size_t)cut->pieces * m * n * batch * sizeof(float)",
     "(size_t)cut->pieces * m * n * batch * sizeof(float) - 4"),
    ("gemm 750", "return compiled.ptxVersion >= 80;", "return 1;"),
    ("gemm 750", "p->swap = p->a.dtype == AMP_BF16 && p->b.dtype == AMP_BF16;", "p->swap = 0;"),
    ("gemm 750", "if (p->swap) p->k += p->k & 1u;", ""),
    ("gemm", "if (!p->sums) cut = ampi_cuda_cut_of(", "if (0) cut = ampi_cuda_cut_of("),
    ("gemm 750", "if (s->a.dtype == AMP_BF16 && ampi_cuda_attribute(cudaDevAttrComputeCapabilityMajor) < 8) return 0;", ""),
    ("gemm", " || exec->stream != c->exec.stream) return 0;", ") return 0;"),
    ("gemm", "cublasGemmStridedBatchedEx(blas, tb, ta,", "cublasGemmStridedBatchedEx(blas, ta, tb,"),
    ("gemm", "if (s->bias) r = ampi_cuda_product_own(exec, op, &bias, batch, AMP_CUDA_EPILOGUE_NONE);", ""),
    ("gemm", "const ampi_series batch = { d->batch, d->a_stride, d->b_stride, d->c_stride };",
     "const ampi_series batch = { 1, d->a_stride, d->b_stride, d->c_stride };"),
    ("gemm", 'if (r == AMP_OK && d->k > 0) r = ampi_cuda_check_pointer(exec, op, "b", d->b);\n', ""),
    ("gemm", "if (d.ldb == 0) d.ldb = d.trans_b == AMP_TRANS ? d.k : d.n;", "if (d.ldb == 0) d.ldb = d.n;"),
    ("gemm conv", "if (s.accumulate) v = __fadd_rn", "if (0) v = __fadd_rn"),
    # --- gemm: Hopper
    ("hopper 900", "&& p->n % unit == 0 && p->ldc % unit == 0", "&& p->ldc % unit == 0"),
    ("hopper 900", "ampi_ptx_mbarrier_wait(r.empty + r.slot, r.parity ^ 1u);",
     "ampi_ptx_mbarrier_wait(r.empty + r.slot, r.parity);"),
    ("hopper 900", "ampi_ptx_mbarrier_wait(r.full + r.slot, r.parity);",
     "ampi_ptx_mbarrier_wait(r.full + r.slot, r.parity ^ 1u);"),
    ("hopper 900", "        ampi_ptx_mbarrier_wait(r.full + r.slot, r.parity);\n", ""),
    ("hopper 900", "            ampi_ptx_mbarrier_wait(r.empty + r.slot, r.parity ^ 1u);\n", ""),
    ("hopper 900", "ampi_ptx_mbarrier_expect(full, ampi_hopper<N>::SLOT);",
     "ampi_ptx_mbarrier_expect(full, ampi_hopper<N>::SLOT - AMPI_HOPPER_BOX);"),
    ("hopper 900", "ampi_ptx_mbarrier_expect(full, ampi_hopper<N>::SLOT);",
     "ampi_ptx_mbarrier_expect(full, AMPI_HOPPER_BOX * 3);"),
    ("hopper 900", "(uint64_t)(1024 >> 4) << 32", "(uint64_t)(512 >> 4) << 32"),
    ("hopper 900", "(ampi_ptx_shared(p) & 0x3ffffu) >> 4", "ampi_ptx_shared(p) >> 4"),
    ("hopper 900", "return 3 * compiled.numRegs >= AMPI_HOPPER_FEEDS + 2 * AMPI_HOPPER_MULTIPLIES;",
     "return compiled.numRegs > 64;"),
    ("hopper 900", "(trans ? AMPI_HOPPER_BOX >> 4 : 1) << 16", "(trans ? 1024 >> 4 : 1) << 16"),
    ("hopper 900", "(uint64_t)1 << 62;", "(uint64_t)2 << 62;"),
    ("hopper 900", "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_SWIZZLE_64B"),
    ("hopper 900", "(TRANS_A ? 16 * 128 : 32) >> 4", "(TRANS_A ? 16 * 128 : 16) >> 4"),
    ("hopper 900", "b_step = (TRANS_B ? 16 * 128 : 32)", "b_step = (TRANS_B ? 8 * 128 : 32)"),
    ("hopper 900", "ampi_ptx_wgmma_wait<1>();\n        if (step > 0) ampi_d_hopper_release(r, last);",
     "ampi_ptx_wgmma_wait<1>();\n        ampi_d_hopper_release(r, r.slot);"),
    ("hopper 900", "        ampi_ptx_wgmma_wait<1>();\n", ""),
    ("hopper 900", "        ampi_ptx_wgmma_fence();\n", ""),
    ("hopper 900", "    ampi_ptx_wgmma_finish(sum);\n", ""),
    ("hopper 900", "        ampi_ptx_wgmma_commit();\n", ""),
    ("hopper 900", "step > 0 || q > 0)", "step > 0 || q >= 0)"),
    ("hopper 900", "        ampi_ptx_fence_async();\n", ""),
    ("hopper 900", "        if (threadIdx.x % 128 == 0) ampi_ptx_bulk_wait_read<1>();\n", ""),
    ("hopper 900", "ampi_ptx_bulk_wait_read<1>()", "ampi_ptx_bulk_wait_read<2>()"),
    ("hopper 900", "        ampi_ptx_fence_async();\n        ampi_ptx_group_sync(group, 128);",
     "        ampi_ptx_fence_async();"),
    ("hopper 900", "    if (threadIdx.x % 128 == 0) ampi_ptx_bulk_wait_read<0>();", "    ;"),
    ("hopper 900", "        ampi_ptx_mbarrier_publish();\n", ""),
    ("hopper 900", "ampi_d_hopper_ring<N>(h, shared);\n    __syncthreads();", "ampi_d_hopper_ring<N>(h, shared);"),
    ("hopper 900", "ampi_ptx_mbarrier_init(r.empty + i, 8);", "ampi_ptx_mbarrier_init(r.empty + i, 4);"),
    ("hopper 900", "    if (threadIdx.x % 32 == 0) ampi_ptx_mbarrier_arrive(r.empty + slot);",
     "    if (threadIdx.x % 64 == 0) ampi_ptx_mbarrier_arrive(r.empty + slot);"),
    ("hopper 900", "full, t.j, k, t.z, N / 64);", "full, t.j, k, t.z, 1);"),
    ("hopper 900", "o->along_k ? tile : (uint32_t)AMPI_HOPPER_DEPTH", "(uint32_t)AMPI_HOPPER_DEPTH"),
    ("hopper 900", "    ampi_ptx_group_sync(3, 256); ", "    ;"),
    ("hopper 900", "    ampi_ptx_cluster_sync();\n    ampi_d_hopper_deliver_groups(", "    ampi_d_hopper_deliver_groups("),
    ("hopper 900", "        __syncwarp();\n    }\n    if (h.p.pieces > 1) ampi_ptx_cluster_sync();\n", "        __syncwarp();\n    }\n"),
    ("hopper 900", "N / 8 * (rank + 1) / p.pieces);", "N / 8 * (rank + 1) / p.pieces - 1);"),
    ("hopper 900", "if (p < pieces) v[p] = ampi_ptx_load_there(four, p);",
     "if (p < pieces) v[p] = ampi_ptx_load_there(four, pieces - 1 - p);"),
    ("hopper 900", "row < 16 && group * 8 + column < end * 8; row += 8)", "row < 16; row += 8)"),
    ("hopper 900", "    if (ampi_d_hopper_clean<BF16>(all) == all) return;", "    return;"),
    ("hopper 900", "i < 8 && all != all; i++)", "i < 0; i++)"),
    ("hopper 900", "        all += v[i].y;\n", ""),
    ("hopper 900", "((2 * b + lane / 16) ^ (lane & 7u)) * 16", "((2 * b + lane / 16) ^ (lane & 3u)) * 16"),
    ("hopper 900", "make_float2(sum[4 * q + 2], sum[4 * q + 3])", "make_float2(sum[4 * q], sum[4 * q + 3])"),
    ("hopper 900", "for (uint32_t s = 1; s < p.pieces; s++) {\n            ampi_d_load8(next, p.sums + s * piece,",
     "for (uint32_t s = 1; s < p.pieces; s++) {\n            ampi_d_load8(next, p.sums + (p.pieces - s) * piece,"),
    # --- conv
    ("conv", "forward = { count, w, x, y, c->og }", "forward = { count, w, x, y, 0 }"),
    ("conv", "op, dy, x, w, dx, dw, db);\n    if (r == AMP_OK && dx) {\n        ampi_cuda_batch",
     "op, dy, x, w, NULL, NULL, NULL);\n    if (r == AMP_OK && dx) {\n        ampi_cuda_batch"),
    # --- nn
    ("nn", "if (!p.exclude_pad) return (float)p.kh * (float)p.kw;",
     "if (p.exclude_pad) return (float)p.kh * (float)p.kw;"),
    ("nn", "float acc = q.p.max ? ampi_float(0xff800000u) : 0.0f;", "float acc = 0.0f;"),
    ("nn", "if (k < area) max = ampi_pool_max(max, v[j]);", "max = ampi_pool_max(max, v[j]);"),
    ("nn", "s.first = at < (unsigned)kernel ? 0 :", "s.first = at <= (unsigned)kernel ? 0 :"),
    ("nn", "int before = i < r || (i == r && j < c);", "int before = i > r || (i == r && j > c);"),
    ("nn", "return (ampi_bits(pivot) & 0x7fffffffu) < 0x7f800000u ? pivot : 0.0f;", "return pivot;"),
    ("nn", "const float pivot = ampi_d_bn_pivot(s, c, shared);\n    double v[2]",
     "const float pivot = 0.0f;\n    double v[2]"),
    ("nn", "        for (int j = 0; j < 8; j++) x[j] -= pivot;\n        ampi_d_trim8(x, end - i);",
     "        for (int j = 0; j < 8; j++) x[j] -= pivot;"),
    ("nn", "    if (s.momentum == 0.0f) return;\n    ampi_bn_run(s.running_mean", "    ampi_bn_run(s.running_mean"),
    ("nn", "(float)(squares / (count - 1.0)));", "(float)(squares / count));"),
    ("nn", "__syncthreads();      /* the last channel's statistics have been read */", ""),
    ("nn", "slope[1] = (float)(dot * (double)invstd / count);", "slope[1] = (float)(dot / count);"),
    ("nn", "ampi_d_store_one(s.dbeta, s.dpt, c, (float)v[0], s.accumulate);",
     "ampi_d_store_one(s.dbeta, s.dpt, c, (float)v[0], 0);"),
    ("nn", "v[j] = (x.v[k][j] - mean) - rest;", "v[j] = x.v[k][j];"),
    ("nn", "            ampi_d_trim8(v, q.d - i);\n            squares[0]", "            squares[0]"),
    ("nn", "fma(squares[0], q.inverse_d, (double)q.eps)", "fma(squares[0], q.inverse_d, 0.0)"),
    ("nn", "ampi_fma(1, dy.v[k][j], g[j], -a)) * invstd;", "ampi_fma(1, dy.v[k][j], g[j], a)) * invstd;"),
    ("nn", "    double sum = 0.0;\n    __syncthreads();\n    for (int j = 0; j < 8; j++) shared[",
     "    double sum = 0.0;\n    for (int j = 0; j < 8; j++) shared["),
    ("nn", "size_t last = row + q.rows / q.parts + (part < q.rows % q.parts);",
     "size_t last = row + q.rows / q.parts;"),
    ("nn", "v[j] = ampi_activate(1, AMP_GELU, v[j]); break;", "v[j] = ampi_activate(1, AMP_GELU_TANH, v[j]); break;"),
    ("nn", "for (int j = 0; j < 8; j++) v[j] += w[j];\n}\nAMPI_D void ampi_d_begin",
     "for (int j = 0; j < 8; j++) v[j] += w[j] * (j != 7);\n}\nAMPI_D void ampi_d_begin"),
    ("nn", "op.offset += *op.position * op.stride;", "op.offset += *op.position;"),
    ("nn", "v[j] = u < op.p ? 0.0f", "v[j] = u <= op.p ? 0.0f"),
    ("nn", "v[j] = old[j] + v[j];\n            ampi_d_round8", "v[j] = v[j] + v[j];\n            ampi_d_round8"),
    ("nn", "        ampi_d_trim8(x.v[k], d - i);\n", ""),
    ("nn", "y.v[k][j] *= dy.v[k][j] - sum;", "y.v[k][j] *= dy.v[k][j];"),
    ("nn", "            ampi_d_trim8(v, q.n - at);\n            sum += (double)ampi_d_sum8(v);",
     "            sum += (double)ampi_d_sum8(v);"),
    ("nn", "    if (q.parts) return;\n    __syncthreads();\n    ampi_d_loss_mean<AMPI_CUDA_BLOCK>",
     "    if (q.parts) return;\n    ampi_d_loss_mean<AMPI_CUDA_BLOCK>"),
    ("nn", "if (label < 0 || (size_t)label >= q.d) return (double)ampi_float(0x7fc00000u);",
     "if (label < 0 || (size_t)label > q.d) return (double)ampi_float(0x7fc00000u);"),
    ("nn", "loss = ampi_fma(1, -q.smoothing, (float)", "loss = ampi_fma(1, q.smoothing, (float)"),
    ("nn", "for (size_t row = part; row < q.n; row += q.count) sum",
     "for (size_t row = part; row < q.n; row += q.count + 1) sum"),
    ("nn", "float target = i + (size_t)j == (size_t)label", "float target = i + (size_t)j + 1 == (size_t)label"),
    ("nn", '{ "dlogits", dlogits, dlogits_dtype, AMPI_OUT | AMPI_NULL, AMPI_FLAT(all) },\n                                   { "loss_scale", loss_scale',
     '{ "dlogits", dlogits, dlogits_dtype, AMPI_OUT | AMPI_NULL, AMPI_FLAT(all) },\n                                   { "loss_scale", nullptr'),
    ("nn", "if (op.kind == AMPI_MSE) op.factor *= 2.0f;", ""),
    ("nn", '{ "dx", dx, dxt, AMPI_OUT | AMPI_NULL, AMPI_FLAT(n) },\n                                   { "loss_scale", loss_scale',
     '{ "dx", dx, dxt, AMPI_OUT | AMPI_NULL, AMPI_FLAT(n) },\n                                   { "loss_scale", nullptr'),
    # --- scaler
    ("scaler", "    if (threadIdx.x < 9)\n        b->last", "    if (threadIdx.x < 8)\n        b->last"),
    ("scaler", "if (b->closed) ampi_overflow_clear(&b->info);", ""),
    ("scaler", "if (found->found_inf && !b->rule.ignore_overflow) b->state.found_inf = 1;",
     "if (found->found_inf) b->state.found_inf = 1;"),
    ("scaler", "if (number + j < s.first) s.first = number + j;", "s.first = number + j;"),
    ("scaler", "if (number + j > s.last) s.last = number + j;", ""),
    ("scaler", "atomicMax(&shared->last, s.last);", ""),
    ("scaler", "if (all[b].last > s.last) s.last = all[b].last;", ""),
    ("scaler", "if (u > ampi_inf_bits(SUMS ? v.y.dtype : v.x.dtype)) s.nan++;",
     "if (u > ampi_inf_bits(SUMS ? v.y.dtype : v.x.dtype) + 1) s.nan++;"),
    ("scaler", "v.end = chunk.offset + chunk.n;", "v.end = chunk.offset + chunk.n - 1;"),
    ("scaler", "ampi_inf_bits(SUMS ? v.y.dtype : v.x.dtype) - 1;", "ampi_inf_bits(SUMS ? v.y.dtype : v.x.dtype);"),
    ("scaler", "    __syncthreads();\n    s.sum = sum[0];", "    s.sum = sum[0];"),
    ("scaler", "if (a.scaler && !a.unscaled && !sums) found->norm", "if (0) found->norm"),
    ("scaler", "    result->finished = 0;\n", "    result->finished = 0 * result->finished + result->finished;\n"),
    ("scaler", "v[j] = ampi_fma(1, v[j], factor, sum[j]);", "v[j] = __fadd_rn(__fmul_rn(v[j], factor), sum[j]);"),
    ("scaler", "if (a.scaler && a.src.found->refused) return;", ""),
    ("scaler", "s->window.lists[i].done &= ~(uint32_t)AMPI_CHECKED;", ";"),
    ("scaler", "if (r == AMP_OK && (block.limits || block.useless))", "if (0)"),
    ("scaler", "if (s->window.recorded || host->recorded)", "if (0)"),
    # --- optim
    ("optim", "info->lr = amp_schedule_lr(&o->desc.schedule, o->state.lr, o->state.step);",
     "info->lr = amp_schedule_lr(&o->desc.schedule, o->state.lr, o->state.step + 1);"),
    ("optim", "double factor = a.scaler && !a.unscaled ?", "double factor = a.scaler ?"),
    ("optim", "if (!a.block->info.applied) return;\n    if (threadIdx.x < AMP",
     "if (threadIdx.x == 0) o->state.step++;\n    if (!a.block->info.applied) return;\n    if (threadIdx.x < AMP"),
    ("optim", "    if (threadIdx.x == 0) ampi_optimizer_advance(o);\n", "    if (threadIdx.x == 0) o->state.step++;\n"),
    ("optim", "    else block->o.state = state;\n", "    else { block->o.state.step = state.step; block->o.state.lr = state.lr; }\n"),
    ("optim", "amp_result r = ampi_optimizer_check_state(state, &o->host.logger, place);", "amp_result r = AMP_OK;"),
    ("optim", "if (k.p.low) ampi_d_store4", "if (k.p.low && k.p.master == NULL) ampi_d_store4"),
    ("optim", "at + 4 * AMPI_CUDA_BLOCK + 4 <= chunk.n; at +=", "at + 4 * AMPI_CUDA_BLOCK <= chunk.n; at +="),
    ("optim", "if (k.p.aligned && at + 4 <= chunk.n)", "if (k.p.aligned && at + 3 <= chunk.n)"),
    ("optim", "if (!a.block->info.applied) return;\n    for (uint64_t c =", "for (uint64_t c ="),
    ("optim", "c < a.list.chunk_count; c += gridDim.x", "c < a.list.chunk_count; c += a.list.chunk_count"),
    ("optim", "if (k.u.frozen) continue;", ""),
    ("optim", "for (uint64_t c = threadIdx.x; c < x.chunks; c += AMPI_CUDA_BLOCK) {",
     "for (uint64_t c = threadIdx.x; c < 1; c += AMPI_CUDA_BLOCK) {"),
    ("optim", "ampi_d_store8(x.data, x.dtype, chunk.offset + at, chunk.offset + chunk.n, zero);",
     "ampi_d_store8(x.data, x.dtype, chunk.offset + at, chunk.offset + chunk.n - 1, zero);"),
    ("optim", "d.aligned = (wide & 15u) == 0 && (narrow & 7u) == 0;", "d.aligned = (wide & 15u) == 0;"),
    ("optim", "for (i = 0; r == AMP_OK && i < count; i++) r = ampi_cuda_check_param(&params[i], exec, place);", ""),
    ("optim", "else amp_cuda_optimizer_destroy(o);\n    return r;", "return r;"),
    ("optim", "if (s && ampi_optimizer_seen(&s->window, t)) return AMP_OK;", ""),
    # --- backend
    ("model", "if (own->position) cudaFree(own->position);", ""),
    ("model", "memcmp(&own->scaler_state, &t->scaler.state, sizeof own->scaler_state) != 0", "0"),
    ("model", "memcmp(&own->optimizer_state, &t->optimizer.state, sizeof own->optimizer_state) != 0", "0"),
    ("model", "r = ampi_cuda_copy_in(o->device->o.groups, from->groups, sizeof from->groups, exec);", ";"),
    ("model", "r = ampi_optimizer_check_rates(from, \"amp_cuda: training step\");", "r = AMP_OK;"),
    ("model", "if (i == grads.count) return AMP_OK;", "return AMP_OK;"),
    ("model", "    ampi_cuda_drop_records(ampi_cuda_context(exec));\n", ""),
    ("model", "memset(c->records, 0, sizeof c->records);", ""),
    ("model", "uint64_t before = t->passes - 1;", "uint64_t before = t->passes;"),
    ("model", "if (own->next_position != t->passes)", "if (0)"),
    ("model", "return r == AMP_OK ? ampi_cuda_scaler_export_flag(own->scaler, flag, exec) : r;", "return r;"),
    ("model", "return ampi_cuda_scaler_import_flag(ampi_cuda_training_of(t)->scaler, flag, exec);",
     "(void)flag; (void)exec; (void)t; return AMP_OK;"),
    ("model", "if (r == AMP_OK && bytes) r = ampi_cuda_copy_if_skipped(now, saved, bytes, own->scaler, exec);", ""),
    ("model", "ampi_cuda_training_note(t);\n    t->limit", "t->limit"),
    ("model", "t->limit = ampi_scaler_limits(&t->scaler, hit);", "(void)hit;"),
    ("model", "ampi_cuda_scaler_abandon(ampi_cuda_training_of(t)->scaler, exec);", "(void)t; (void)exec;"),
    ("model", "if (c->records[i].key == key) return", "return"),
    ("model", "if (!c->desc.graph) return AMP_OK;\n    if (!found)", "if (!found)"),
    ("model", "if (c->record_count < AMPI_CUDA_RECORDS) c->records", "c->records"),
    ("model", "if (graph) cudaGraphDestroy(graph);", ""),
    ("model", "if (body != AMP_OK) { cudaGetLastError(); return body; }", ""),
    ("model", 'return ampi_cuda_check(exec, "amp_cuda: graph", cudaGraphLaunch(ready, stream));', "return AMP_OK;"),
]

HERE = os.path.dirname(os.path.abspath(__file__))


class Cuda(mutants.Header):
    name = "amp_cuda.cuh"
    table = TABLE
    tests = "half gemm hopper conv nn scaler optim model".split()
    own = "half nn".split()      # these hold a copy of the implementation
    seconds = 300
    out = os.path.join(mutants.ROOT, "build", "mutants_emu")
    compiler = os.environ.get("CXX", "g++")
    # Without SIMD in amp.h this compiles in two thirds of the time.
    flags = ["-std=c++14", "-Og", "-w", "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment",
             "-DTEST_STOP=1", "-DAMP_NO_SIMD", "-I" + HERE]

    def arch(self, likely):
        return ([w for w in likely.split() if w.isdigit()] + ["800"])[0]

    def build_tests(self):
        self.compile(*self.flags, "-c", os.path.join(HERE, "emu.cpp"), "-o", os.path.join(self.out, "emu.o"))
        for arch in sorted({self.arch(row[0]) for row in self.table}):
            for test in self.tests:
                if test not in self.own:
                    self.compile(*self.flags, "-DAMP_EMU_ARCH=" + arch, "-c",
                                 os.path.join(HERE, "test_cuda_%s.cpp" % test), "-o",
                                 os.path.join(self.out, test + arch + ".o"))

    def build(self, folder, likely):
        """A copy of the tests beside the faulty header; impl.o follows with the first test that needs it."""
        emu = os.path.join(folder, "tests", "emu")
        os.makedirs(emu, exist_ok=True)
        for source in os.listdir(HERE):
            if source.endswith((".cpp", ".h")):
                shutil.copy(os.path.join(HERE, source), emu)
        shutil.copy(os.path.join(HERE, "..", "test.h"), os.path.join(folder, "tests"))
        shutil.copy(os.path.join(mutants.ROOT, "amp.h"), folder)

    def build_impl(self, folder, likely):
        self.compile(*self.flags, "-DAMP_EMU_ARCH=" + self.arch(likely), "-DAMP_IMPLEMENTATION", "-x", "c++",
                     "-c", os.path.join(folder, self.name), "-o", os.path.join(folder, "impl.o"))

    def link(self, test, folder, likely, program):
        emu, impl = os.path.join(self.out, "emu.o"), os.path.join(folder, "impl.o")
        if test in self.own:
            self.compile(*self.flags, "-DAMP_EMU_ARCH=" + self.arch(likely),
                         os.path.join(folder, "tests", "emu", "test_cuda_%s.cpp" % test), emu, "-o", program, "-lm")
            return
        if not os.path.exists(impl):
            self.build_impl(folder, likely)
        self.compile(*self.flags, os.path.join(self.out, test + self.arch(likely) + ".o"), emu, impl, "-o", program,
                     "-lm")


if __name__ == "__main__":
    sys.exit(mutants.main(Cuda()))
