// headrace's CPU kernels: a Llama-shaped forward over KV slots, int8 linear layers and a sampler, called from
// Python through ctypes. Nothing here allocates what the caller could hold, keeps state or throws.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "copying.h"
#include "gemm.h"
#include "sampler.h"
#include "team.h"
#include "training.h"
#include "vector.h"

namespace {

struct Layer {
    Linear qkv, out, gate_up, down;
    const float *input_norm, *mlp_norm;  // [hidden]
    const float *query_norm, *key_norm;  // [dim], or null
    void *keys, *values;
    int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
    int64_t window;
    float scaling;
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, dim, intermediate;
    float epsilon;
    int32_t half_kv;         // KV is bfloat16
    const float* embedding;  // [vocabulary][hidden]
    const float* norm;       // [hidden]
    const Layer* layer;
    Linear head;
};

struct Batch {
    int64_t rows, clusters, outputs;
    const int64_t* tokens;     // [rows]
    const int32_t* slots;      // [rows]
    const int32_t* positions;  // [rows]
    const Cluster* cluster;
    const float *cosine, *sine;  // [rows][dim]
    const int32_t* output_rows;  // [outputs]
    float* logits;               // [outputs][vocabulary]
    float* scratch;              // see headrace_scratch
    int32_t threads;
};

constexpr int64_t FEW = 4;  // so many rows are worth a second thread

float root_mean_square(const float* x, int64_t count, float epsilon) {
    Floats sum = {};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) sum += load(x + j) * load(x + j);
    float total = sum_lanes(sum);
    for (; j < count; j++) total += x[j] * x[j];
    return 1.0f / sqrtf(total / count + epsilon);
}

void scale_row(const float* x, const float* weight, float factor, int64_t count, float* out) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) store(out + j, load(x + j) * factor * load(weight + j));
    for (; j < count; j++) out[j] = x[j] * factor * weight[j];
}

void normalise(const float* x, const float* weight, int64_t count, float epsilon, float* out) {
    scale_row(x, weight, root_mean_square(x, count, epsilon), count, out);
}

// One row to int8: out = round(x * smooth / scale), symmetric, with one scale for the row.
void quantise(const float* x, const Linear& linear, int8_t* out, float* scale, int32_t* sum) {
    const int64_t count = linear.inputs;
    float peak = 0;
    Floats best = {}, broken = {};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        const Floats y = load(x + j) * load(linear.smooth + j);
        best = maximum(absolute(y), best);
        broken += y * 0.0f;
    }
    peak = max_lanes(best);
    float bad = sum_lanes(broken);
    for (int64_t i = j; i < count; i++) {
        const float y = x[i] * linear.smooth[i];
        peak = std::max(peak, fabsf(y));
        bad += y * 0.0f;
    }
    // What is not finite must not be rounded away.
    *scale = bad == 0 ? peak / 127 : NAN;
    const float inverse = bad == 0 && peak > 0 ? 127 / peak : 0;
    const float magic = 12582912.0f;
    Ints total = {};
    for (j = 0; j + LANES <= count; j += LANES) {
        Floats y = load(x + j) * load(linear.smooth + j) * inverse;
        if (bad != 0) y = Floats{};
        const Ints q = (Ints)(y + magic) - 0x4b400000;
        total += q;
        *(UnalignedInt8*)(out + j) = __builtin_convertvector(q, UnalignedInt8);
    }
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all += total[i];
    for (; j < padded_inputs(count); j++) {
        const float y = j < count && bad == 0 ? x[j] * linear.smooth[j] * inverse : 0;
        out[j] = (int8_t)nearbyintf(y);
        all += out[j];
    }
    *sum = all;
}

// Float rows and their int8 form, if the layer wants it.
struct Workspace {
    float *hidden, *normed, *qkv, *attended, *gate_up, *activated, *selected, *scales;
    int32_t* sums;
    int8_t* bytes;
};

int64_t lay_out(const Model& model, int64_t rows, int64_t outputs, float* base, Workspace* space) {
    const int64_t widest = std::max({model.hidden, model.heads * model.dim, model.intermediate});
    const int64_t most = std::max(rows, outputs);
    float* next = base;
    auto take = [&](int64_t count) {
        float* here = next;
        next += (count + 15) / 16 * 16;
        return here;
    };
    Workspace unused;
    Workspace& w = space ? *space : unused;
    w.hidden = take(rows * model.hidden);
    w.normed = take(most * model.hidden);
    w.qkv = take(rows * (model.heads + 2 * model.kv_heads) * model.dim);
    w.attended = take(rows * model.heads * model.dim);
    w.gate_up = take(rows * 2 * model.intermediate);
    w.activated = take(rows * model.intermediate);
    w.selected = take(outputs * model.hidden);
    w.scales = take(most);
    w.sums = (int32_t*)take(most);
    w.bytes = (int8_t*)take(most * (padded_inputs(widest) + 3) / 4);
    return next - base;
}

Inputs inputs_of(const float* rows, const Workspace& w) { return {rows, w.bytes, w.scales, w.sums}; }

// One row as `linear` takes it; a float row stays where it is.
void prepare(const Linear& linear, const float* row, int64_t r, Workspace& w) {
    if (linear.scale) quantise(row, linear, w.bytes + r * padded_inputs(linear.inputs), w.scales + r, w.sums + r);
}

// x = norm(x), prepared for `linear`.
void normalise_rows(
    const Member& member, const Linear& linear, const float* x, const float* weight, int64_t rows, float epsilon,
    Workspace& w
) {
    int64_t r, last;
    const int64_t width = linear.inputs;
    for (member.share(rows, FEW, &r, &last); r < last; r++) {
        normalise(x + r * width, weight, width, epsilon, w.normed + r * width);
        prepare(linear, w.normed + r * width, r, w);
    }
}

// x = x * cos + rotate_half(x) * sin, after an optional norm (Qwen 3).
void rotate(float* x, const float* norm, const float* cosine, const float* sine, int64_t dim, float epsilon) {
    if (norm) normalise(x, norm, dim, epsilon, x);
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = a * cosine[d] - b * sine[d];
        x[d + half] = b * cosine[d + half] + a * sine[d + half];
    }
}

template <typename KV>
void store_kv(const Member& member, const Model& model, const Layer& layer, const Batch& batch, Workspace& w) {
    const int64_t dim = model.dim, width = (model.heads + 2 * model.kv_heads) * dim;
    const Plane<KV> keys = {(KV*)layer.keys, layer.key_slot_stride, layer.key_head_stride};
    const Plane<KV> values = {(KV*)layer.values, layer.value_slot_stride, layer.value_head_stride};
    int64_t r, last;
    for (member.share(batch.rows, FEW, &r, &last); r < last; r++) {
        float* row = w.qkv + r * width;
        const float *cosine = batch.cosine + r * dim, *sine = batch.sine + r * dim;
        for (int64_t h = 0; h < model.heads; h++)
            rotate(row + h * dim, layer.query_norm, cosine, sine, dim, model.epsilon);
        for (int64_t h = 0; h < model.kv_heads; h++) {
            float* key = row + (model.heads + h) * dim;
            const float* value = row + (model.heads + model.kv_heads + h) * dim;
            rotate(key, layer.key_norm, cosine, sine, dim, model.epsilon);
            KV* to_key = keys.row(batch.slots[r], h, batch.positions[r], dim);
            KV* to_value = values.row(batch.slots[r], h, batch.positions[r], dim);
            for (int64_t d = 0; d < dim; d++) {
                from_float(key[d], to_key + d);
                from_float(value[d], to_value + d);
            }
        }
    }
}

template <typename KV>
void attention(Member& member, const Model& model, const Layer& layer, const Batch& batch, Workspace& w) {
    store_kv<KV>(member, model, layer, batch, w);
    member.barrier();
    const Shape shape = {model.heads, model.kv_heads, model.dim, layer.window, layer.scaling};
    const Plane<KV> keys = {(KV*)layer.keys, layer.key_slot_stride, layer.key_head_stride};
    const Plane<KV> values = {(KV*)layer.values, layer.value_slot_stride, layer.value_head_stride};
    const int64_t stride = (model.heads + 2 * model.kv_heads) * model.dim;
    std::vector<float> space;
    for (int64_t task; (task = member.take(batch.clusters * model.kv_heads)) >= 0;)
        attend_cluster<KV>(
            shape, keys, values, batch.cluster[task / model.kv_heads], task % model.kv_heads, batch.slots,
            batch.positions, w.qkv, stride, w.attended, space
        );
}

// silu(gate) * up
void activate(const float* gate, const float* up, int64_t width, float* out) {
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        const Floats g = load(gate + j);
        store(out + j, g / (1.0f + exponential(-g)) * load(up + j));
    }
    for (; j < width; j++) out[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
}

void decoder_layer(Member& member, const Model& m, const Layer& layer, const Batch& b, Workspace& w) {
    int64_t r, last;
    normalise_rows(member, layer.qkv, w.hidden, layer.input_norm, b.rows, m.epsilon, w);
    member.barrier();
    apply_linear(member, layer.qkv, inputs_of(w.normed, w), b.rows, nullptr, w.qkv);
    member.barrier();
    if (m.half_kv)
        attention<uint16_t>(member, m, layer, b, w);
    else
        attention<float>(member, m, layer, b, w);
    member.barrier();
    if (layer.out.scale) {
        for (member.share(b.rows, FEW, &r, &last); r < last; r++)
            prepare(layer.out, w.attended + r * layer.out.inputs, r, w);
        member.barrier();
    }
    apply_linear(member, layer.out, inputs_of(w.attended, w), b.rows, w.hidden, w.hidden);
    member.barrier();
    normalise_rows(member, layer.gate_up, w.hidden, layer.mlp_norm, b.rows, m.epsilon, w);
    member.barrier();
    apply_linear(member, layer.gate_up, inputs_of(w.normed, w), b.rows, nullptr, w.gate_up);
    member.barrier();
    const int64_t width = m.intermediate;
    for (member.share(b.rows, FEW, &r, &last); r < last; r++) {
        const float* gate = w.gate_up + r * 2 * width;
        activate(gate, gate + width, width, w.activated + r * width);
        prepare(layer.down, w.activated + r * width, r, w);
    }
    member.barrier();
    apply_linear(member, layer.down, inputs_of(w.activated, w), b.rows, w.hidden, w.hidden);
    member.barrier();
}

void forward(Member& member, const Model& m, const Batch& b, Workspace& w) {
    int64_t r, last;
    for (member.share(b.rows, FEW, &r, &last); r < last; r++)
        memcpy(w.hidden + r * m.hidden, m.embedding + b.tokens[r] * m.hidden, m.hidden * sizeof(float));
    member.barrier();
    for (int64_t i = 0; i < m.layers; i++) decoder_layer(member, m, m.layer[i], b, w);
    for (member.share(b.outputs, FEW, &r, &last); r < last; r++)
        memcpy(w.selected + r * m.hidden, w.hidden + b.output_rows[r] * m.hidden, m.hidden * sizeof(float));
    normalise_rows(member, m.head, w.selected, m.norm, b.outputs, m.epsilon, w);
    member.barrier();
    apply_linear(member, m.head, inputs_of(w.normed, w), b.outputs, nullptr, b.logits);
}

}  // namespace

extern "C" {

// What the target makes of the layout of packed weights.
int32_t headrace_tile_columns() { return TILE_COLUMNS; }

int64_t headrace_scratch(const Model* model, int64_t rows, int64_t outputs) {
    return lay_out(*model, rows, outputs, nullptr, nullptr);
}

void headrace_forward(const Model* model, const Batch* batch) {
    Workspace w;
    lay_out(*model, batch->rows, batch->outputs, batch->scratch, &w);
    together(batch->threads, [&](Member& member) { forward(member, *model, *batch, w); });
}

// out [rows][outputs] = linear(x [rows][inputs]); the caller's scratch holds what int8 needs.
void headrace_linear(
    const Linear* linear, const float* x, int64_t rows, float* out, int8_t* bytes, float* scales, int32_t* sums,
    int32_t threads
) {
    Workspace w = {};
    w.bytes = bytes, w.scales = scales, w.sums = sums;
    together(threads, [&](Member& member) {
        int64_t r, last;
        for (member.share(rows, FEW, &r, &last); r < last; r++) prepare(*linear, x + r * linear->inputs, r, w);
        member.barrier();
        apply_linear(member, *linear, inputs_of(x, w), rows, nullptr, out);
    });
}

void headrace_pack_float(
    const float* weight, int64_t rows, int64_t inputs, int64_t column, float* packed, int32_t threads
) {
    pack_float(weight, rows, inputs, column, packed, threads);
}

void headrace_column_peaks(const float* weight, int64_t rows, int64_t inputs, float* peaks, int32_t threads) {
    column_peaks(weight, rows, inputs, peaks, threads);
}

void headrace_pack_int8(
    const float* weight, int64_t rows, int64_t inputs, int64_t column, const float* smooth, uint8_t* packed,
    float* scales, int32_t threads
) {
    pack_int8(weight, rows, inputs, column, smooth, packed, scales, threads);
}

void headrace_sample(
    const float* logits, int64_t rows, int64_t vocabulary, const float* temperatures, const double* uniforms,
    int64_t* ids, double* logprobs, int32_t threads
) {
    together(threads, [&](Member& member) {
        for (int64_t r; (r = member.take(rows)) >= 0;)
            draw(logits + r * vocabulary, vocabulary, temperatures[r], uniforms[r], ids + r, logprobs + r);
    });
}

void headrace_packed_attention(const PackedBatch* batch, int32_t threads) {
    const auto work = batch->shape.dim == 64    ? attend_segment<64>
                      : batch->shape.dim == 128 ? attend_segment<128>
                                                : attend_segment<0>;
    together(threads, [&](Member& member) {
        Held held;
        for (int64_t task; (task = member.take(batch->segments * batch->shape.kv_heads)) >= 0;)
            work(*batch, batch->segment[task / batch->shape.kv_heads], task % batch->shape.kv_heads, held);
    });
}

void headrace_packed_attention_backward(
    const PackedBatch* batch, const Strided* gradient, const Strided* query_gradient, const Strided* key_gradient,
    const Strided* value_gradient, int32_t threads
) {
    const auto work = batch->shape.dim == 64    ? attend_segment_backward<64>
                      : batch->shape.dim == 128 ? attend_segment_backward<128>
                                                : attend_segment_backward<0>;
    together(threads, [&](Member& member) {
        Held held;
        for (int64_t task; (task = member.take(batch->segments * batch->shape.kv_heads)) >= 0;)
            work(
                *batch, batch->segment[task / batch->shape.kv_heads], task % batch->shape.kv_heads, *gradient,
                *query_gradient, *key_gradient, *value_gradient, held
            );
    });
}

// inverses [rows] holds 1 / rms of each row, for the way back.
void headrace_rms_norm(
    const float* x, const float* weight, int64_t rows, int64_t width, float epsilon, float* out, float* inverses,
    int32_t threads
) {
    together(threads, [&](Member& member) {
        int64_t r, last;
        for (member.share(rows, FEW, &r, &last); r < last; r++) {
            inverses[r] = root_mean_square(x + r * width, width, epsilon);
            scale_row(x + r * width, weight, inverses[r], width, out + r * width);
        }
    });
}

// weight_gradients [threads][width] must be zeros; their sum over threads is the gradient.
void headrace_rms_norm_backward(
    const float* x, const float* weight, const float* gradient, const float* inverses, int64_t rows, int64_t width,
    float* dx, float* weight_gradients, int32_t threads
) {
    together(threads, [&](Member& member) {
        int64_t r, last;
        for (member.share(rows, FEW, &r, &last); r < last; r++)
            normalise_backward(
                x + r * width, weight, gradient + r * width, width, inverses[r], dx + r * width,
                weight_gradients + member.rank * width
            );
    });
}

void headrace_swiglu(const float* gate, const float* up, int64_t count, float* out, int32_t threads) {
    together(threads, [&](Member& member) {
        int64_t first, last;
        member.share(count, 1 << 12, &first, &last);
        if (first < last) activate(gate + first, up + first, last - first, out + first);
    });
}

void headrace_swiglu_backward(
    const float* gate, const float* up, const float* gradient, int64_t count, float* gate_gradient,
    float* up_gradient, int32_t threads
) {
    together(threads, [&](Member& member) {
        int64_t first, last;
        member.share(count, 1 << 12, &first, &last);
        if (first < last)
            activate_backward(
                gate + first, up + first, gradient + first, last - first, gate_gradient + first, up_gradient + first
            );
    });
}

// normalisers [rows]; a row that is not finite gets NaN.
void headrace_log_sum_exp(
    const float* logits, int64_t rows, int64_t vocabulary, const float* temperatures, float* normalisers,
    int32_t threads
) {
    together(threads, [&](Member& member) {
        for (int64_t r; (r = member.take(rows)) >= 0;)
            normalisers[r] = log_sum_exp(logits + r * vocabulary, vocabulary, temperatures[r]);
    });
}

void headrace_scaled_softmax(
    const float* logits, int64_t rows, int64_t vocabulary, const float* temperatures, const float* normalisers,
    const float* factors, float* out, int32_t threads
) {
    together(threads, [&](Member& member) {
        for (int64_t r; (r = member.take(rows)) >= 0;)
            scaled_softmax(
                logits + r * vocabulary, vocabulary, temperatures[r], normalisers[r], factors[r], out + r * vocabulary
            );
    });
}

int64_t headrace_weight_gradient_scratch(int64_t m, int64_t n, int64_t k) { return weight_gradient_scratch(m, n, k); }

void headrace_weight_gradient(
    const float* gradient, const float* x, int64_t m, int64_t n, int64_t k, float* out, float* scratch,
    int32_t threads
) {
    together(threads, [&](Member& member) { weight_gradient(member, gradient, x, m, n, k, out, scratch); });
}

// sums [stripes of size]
void headrace_stripe_sums(
    const char* bytes, int64_t size, const uint64_t* constants, uint64_t* sums, int32_t threads
) {
    const int64_t few = 64, count = stripes(size);
    together(count < few ? 1 : threads, [&](Member& member) {
        int64_t first, last;
        member.share(count, few, &first, &last);
        if (first >= last) return;
        stripe_sums(bytes + first * STRIPE, std::min(last * STRIPE, size) - first * STRIPE, constants, sums + first);
    });
}

void headrace_load_blocks(const BlockCopy* copy, int32_t threads) {
    together(copy->blocks > 1 ? threads : 1, [&](Member& member) {
        std::vector<char> space;
        for (int64_t block; (block = member.take(copy->blocks)) >= 0;) load_block(*copy, block, space);
    });
}

// Here `slot` is [blocks][buffers] and `addresses` [blocks].
void headrace_store_blocks(const BlockCopy* copy, int32_t threads) {
    together(copy->blocks > 1 ? threads : 1, [&](Member& member) {
        for (int64_t block; (block = member.take(copy->blocks)) >= 0;) store_block(*copy, block);
    });
}

}  // extern "C"
