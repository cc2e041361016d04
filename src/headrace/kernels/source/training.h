// What training needs beside matrix products, forward and backward: attention over packed rows, RMSNorm, SwiGLU.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "team.h"
#include "vector.h"

// Tokens `start ... start + length - 1` of a packed row: a prompt, or a response to the prompt that its segment
// begins with.
struct Piece {
    int64_t start, length;
};

// A prompt and its responses: pieces `first ... first + count - 1`, the prompt first.
struct Segment {
    int64_t first, count;
};

// Element (token, head, d) of a [N][heads][dim] tensor lies at token * token_stride + head * head_stride + d.
struct Strided {
    float* base;
    int64_t token_stride, head_stride;
    float* row(int64_t token, int64_t head) const { return base + token * token_stride + head * head_stride; }
};

struct PackedBatch {
    Shape shape;
    int64_t segments;
    const Segment* segment;
    const Piece* piece;
    Strided query, key, value;
    Strided out;     // [N][heads][dim], contiguous
    float* log_sum;  // [N][heads], of the scaled scores
};

static inline int64_t whole_vectors(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

// The keys and values of one segment and head, piece after piece; each piece begins at a multiple of LANES rows.
struct Held {
    std::vector<float> keys, values, key_gradients, value_gradients, weights, slopes;
    std::vector<int64_t> offsets;  // of each piece

    void take(const PackedBatch& b, const Segment& s, int64_t head, bool gradients) {
        const int64_t dim = b.shape.dim;
        offsets.assign(s.count, 0);
        int64_t rows = 0, longest = 0;
        for (int64_t i = 0; i < s.count; i++) {
            offsets[i] = rows;
            rows += whole_vectors(b.piece[s.first + i].length);
            longest = std::max(longest, b.piece[s.first + i].length);
        }
        keys.assign(rows * dim, 0.0f);
        values.assign(rows * dim, 0.0f);
        if (gradients) {
            key_gradients.assign(rows * dim, 0.0f);
            value_gradients.assign(rows * dim, 0.0f);
        }
        weights.resize(whole_vectors(b.piece[s.first].length) + whole_vectors(longest));
        slopes.resize(weights.size());
        for (int64_t i = 0; i < s.count; i++) {
            const Piece& piece = b.piece[s.first + i];
            for (int64_t t = 0; t < piece.length; t++) {
                const int64_t place = (offsets[i] + t) * dim;
                memcpy(&keys[place], b.key.row(piece.start + t, head), dim * sizeof(float));
                memcpy(&values[place], b.value.row(piece.start + t, head), dim * sizeof(float));
            }
        }
    }
};

// A run of keys that a token sees: `count` rows of Held from `row` on; `weight` is where their weights stand.
struct Run {
    int64_t row, count, weight;
};

// What token t of piece i sees: of the prompt, and of its own piece.
static inline void runs_of(
    const PackedBatch& b, const Segment& s, const Held& held, int64_t i, int64_t t, Run* prompt, Run* own
) {
    const int64_t before = i ? b.piece[s.first].length : 0;
    const Span span = seen_from(before + t, b.shape.window);
    const int64_t in_prompt = std::min(span.start, before), in_own = std::max<int64_t>(0, span.start - before);
    *prompt = {in_prompt, before - in_prompt, 0};
    *own = {held.offsets[i] + in_own, t + 1 - in_own, whole_vectors(prompt->count)};
}

// weights[j] = x . rows_j for a run, whole vectors at a time; what lies behind its end is set to `rest`.
static inline __attribute__((always_inline)) void dot_run(
    const float* x, const std::vector<float>& rows, const Run& run, int64_t dim, float factor, float rest, float* out
) {
    for (int64_t j = 0; j < run.count; j += LANES) {
        const int64_t left = run.count - j;
        if (left >= LANES) {
            store(out + run.weight + j, dot_keys(x, &rows[(run.row + j) * dim], dim) * factor);
        } else {
            for (int64_t k = 0; k < left; k++) {
                Floats sum = {};
                for (int64_t d = 0; d < dim; d += LANES) sum += load(x + d) * load(&rows[(run.row + j + k) * dim + d]);
                out[run.weight + j + k] = sum_lanes(sum) * factor;
            }
            for (int64_t k = left; k < LANES; k++) out[run.weight + j + k] = rest;
        }
    }
}

template <int DIM>
static void attend_segment(const PackedBatch& b, const Segment& s, int64_t head, Held& held) {
    const int64_t dim = DIM ? DIM : b.shape.dim, group = b.shape.heads / b.shape.kv_heads;
    held.take(b, s, head, false);
    float* weights = held.weights.data();
    for (int64_t i = 0; i < s.count; i++)
        for (int64_t t = 0; t < b.piece[s.first + i].length; t++) {
            const int64_t token = b.piece[s.first + i].start + t;
            Run runs[2];
            runs_of(b, s, held, i, t, &runs[0], &runs[1]);
            const int64_t all = runs[1].weight + whole_vectors(runs[1].count);
            for (int64_t g = 0; g < group; g++) {
                const int64_t h = head * group + g;
                const float* q = b.query.row(token, h);
                for (const Run& run : runs)
                    dot_run(q, held.keys, run, dim, b.shape.scaling, -INFINITY, weights);
                Floats best = broadcast(-INFINITY), total = {};
                for (int64_t j = 0; j < all; j += LANES) best = maximum(load(weights + j), best);
                const float peak = max_lanes(best);
                for (int64_t j = 0; j < all; j += LANES) {
                    const Floats weight = exponential(load(weights + j) - peak);
                    store(weights + j, weight);
                    total += weight;
                }
                const float sum = sum_lanes(total);
                float* out = b.out.row(token, h);
                for (int64_t d = 0; d < dim; d += LANES) store(out + d, Floats{});
                for (const Run& run : runs)
                    add_values(weights + run.weight, &held.values[run.row * dim], run.count, dim, out);
                for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) / sum);
                b.log_sum[token * b.shape.heads + h] = peak + logf(sum);
            }
        }
}

// rows_j += weights[j] * x for a run.
static inline __attribute__((always_inline)) void spread(
    const float* weights, const float* x, const Run& run, int64_t dim, std::vector<float>& rows
) {
    for (int64_t j = 0; j < run.count; j++) {
        float* to = &rows[(run.row + j) * dim];
        const Floats weight = broadcast(weights[run.weight + j]);
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(to + d) + weight * load(x + d));
    }
}

// Gradients of one segment and head (FlashAttention-2, arXiv 2307.08691, algorithm 2, without its blocks).
template <int DIM>
static void attend_segment_backward(
    const PackedBatch& b, const Segment& s, int64_t head, const Strided& gradient, const Strided& query_gradient,
    const Strided& key_gradient, const Strided& value_gradient, Held& held
) {
    const int64_t dim = DIM ? DIM : b.shape.dim, group = b.shape.heads / b.shape.kv_heads;
    held.take(b, s, head, true);
    float *weights = held.weights.data(), *slopes = held.slopes.data();
    for (int64_t i = 0; i < s.count; i++)
        for (int64_t t = 0; t < b.piece[s.first + i].length; t++) {
            const int64_t token = b.piece[s.first + i].start + t;
            Run runs[2];
            runs_of(b, s, held, i, t, &runs[0], &runs[1]);
            const int64_t all = runs[1].weight + whole_vectors(runs[1].count);
            for (int64_t g = 0; g < group; g++) {
                const int64_t h = head * group + g;
                const float *q = b.query.row(token, h), *up = gradient.row(token, h), *out = b.out.row(token, h);
                Floats dot = {};
                for (int64_t d = 0; d < dim; d += LANES) dot += load(up + d) * load(out + d);
                const float delta = sum_lanes(dot), log_sum = b.log_sum[token * b.shape.heads + h];
                for (const Run& run : runs) {
                    dot_run(q, held.keys, run, dim, b.shape.scaling, -INFINITY, weights);
                    dot_run(up, held.values, run, dim, 1.0f, 0.0f, slopes);
                }
                for (int64_t j = 0; j < all; j += LANES) {
                    const Floats weight = exponential(load(weights + j) - log_sum);
                    store(weights + j, weight);
                    store(slopes + j, weight * (load(slopes + j) - delta) * b.shape.scaling);
                }
                float* dq = query_gradient.row(token, h);
                for (int64_t d = 0; d < dim; d += LANES) store(dq + d, Floats{});
                for (const Run& run : runs) {
                    add_values(slopes + run.weight, &held.keys[run.row * dim], run.count, dim, dq);
                    spread(weights, up, run, dim, held.value_gradients);
                    spread(slopes, q, run, dim, held.key_gradients);
                }
            }
        }
    for (int64_t i = 0; i < s.count; i++) {
        const Piece& piece = b.piece[s.first + i];
        for (int64_t t = 0; t < piece.length; t++) {
            const int64_t place = (held.offsets[i] + t) * dim;
            memcpy(key_gradient.row(piece.start + t, head), &held.key_gradients[place], dim * sizeof(float));
            memcpy(value_gradient.row(piece.start + t, head), &held.value_gradients[place], dim * sizeof(float));
        }
    }
}

// dx of y = weight * x / rms(x), and what the row adds to the weight's gradient.
static inline void normalise_backward(
    const float* x, const float* weight, const float* gradient, int64_t count, float inverse, float* dx, float* dw
) {
    Floats dot = {};
    float rest = 0;
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        const Floats y = load(x + j) * load(gradient + j);
        dot += y * load(weight + j);
        store(dw + j, load(dw + j) + y * inverse);
    }
    for (; j < count; j++) {
        rest += x[j] * gradient[j] * weight[j];
        dw[j] += x[j] * gradient[j] * inverse;
    }
    const float mean = (sum_lanes(dot) + rest) / count * inverse * inverse;
    for (j = 0; j + LANES <= count; j += LANES)
        store(dx + j, (load(gradient + j) * load(weight + j) - load(x + j) * mean) * inverse);
    for (; j < count; j++) dx[j] = (gradient[j] * weight[j] - x[j] * mean) * inverse;
}

// Gradients of silu(gate) * up.
static inline void activate_backward(
    const float* gate, const float* up, const float* gradient, int64_t count, float* gate_gradient, float* up_gradient
) {
    int64_t j = 0;
    auto step = [](Floats g, Floats u, Floats d, Floats* dg, Floats* du) {
        const Floats sigmoid = 1.0f / (1.0f + exponential(-g));
        *du = d * g * sigmoid;
        *dg = d * u * sigmoid * (1.0f + g * (1.0f - sigmoid));
    };
    for (; j + LANES <= count; j += LANES) {
        Floats dg, du;
        step(load(gate + j), load(up + j), load(gradient + j), &dg, &du);
        store(gate_gradient + j, dg);
        store(up_gradient + j, du);
    }
    for (; j < count; j++) {
        Floats dg, du;
        step(broadcast(gate[j]), broadcast(up[j]), broadcast(gradient[j]), &dg, &du);
        gate_gradient[j] = dg[0];
        up_gradient[j] = du[0];
    }
}

// log sum_v exp(logits_v / temperature). A logit of -inf counts as nothing; NaN or +inf give NaN.
static inline float log_sum_exp(const float* logits, int64_t count, float temperature) {
    const float inverse = 1.0f / temperature;
    Floats best = broadcast(-INFINITY);
    Ints broken = {};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        const Floats x = load(logits + j) * inverse;
        best = maximum(x, best);
        broken |= ~(x < INFINITY);
    }
    float peak = max_lanes(best);
    bool bad = false;
    for (int lane = 0; lane < LANES; lane++) bad |= broken[lane] != 0;
    for (int64_t i = j; i < count; i++) {
        peak = std::max(peak, logits[i] * inverse);
        bad |= !(logits[i] < INFINITY);
    }
    if (bad || !std::isfinite(peak)) return NAN;
    Floats total = {};
    for (j = 0; j + LANES <= count; j += LANES) total += exponential(load(logits + j) * inverse - peak);
    float sum = sum_lanes(total);
    for (; j < count; j++) sum += expf(logits[j] * inverse - peak);
    return peak + logf(sum);
}

// out_v = factor * exp(logits_v / temperature - normaliser)
static inline void scaled_softmax(
    const float* logits, int64_t count, float temperature, float normaliser, float factor, float* out
) {
    const float inverse = 1.0f / temperature;
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES)
        store(out + j, exponential(load(logits + j) * inverse - normaliser) * factor);
    for (; j < count; j++) out[j] = expf(logits[j] * inverse - normaliser) * factor;
}
