// Attention of single tokens over the KV of their sequences: causal, grouped queries, optional sliding window.
//
// A token's result depends on its query, its position and the keys and values that it sees, in every bit: keys are
// taken in blocks that start at multiples of BLOCK positions, in ascending order, with a running softmax.
#pragma once

#include <algorithm>
#include <vector>

#include "team.h"
#include "vector.h"

constexpr int64_t BLOCK = 32;  // keys between two rescalings, a multiple of LANES

// One layer's keys or values: element (slot, head, position, d) lies at
// slot * slot_stride + head * head_stride + position * dim + d.
template <typename KV>
struct Plane {
    KV* base;
    int64_t slot_stride, head_stride;
    KV* row(int64_t slot, int64_t head, int64_t position, int64_t dim) const {
        return base + slot * slot_stride + head * head_stride + position * dim;
    }
};

// Tokens first ... first + count - 1 of the batch, whose sequences agree in their first `shared` tokens: those keys
// and values are read once, from the first token's slot.
struct Cluster {
    int32_t first, count;
    int64_t shared;
};

struct Shape {
    int64_t heads, kv_heads, dim;
    int64_t window;  // tokens that a query sees, itself included; 0 for all
    float scaling;
};

// Rows of a block as floats: in place, or converted into `space`.
static inline const float* as_floats(const float* rows, int64_t, float*) { return rows; }
static inline const float* as_floats(const uint16_t* rows, int64_t count, float* space) {
    for (int64_t i = 0; i < count; i += LANES) store(space + i, load(rows + i));
    return space;
}

template <typename KV>
static inline void bring_near(const KV* rows, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(KV)) __builtin_prefetch(rows + i, 0, 2);
}

// Folds the halves of every block of WIDTH lanes of a and b onto one another; b's blocks come after a's.
template <int WIDTH>
static inline Floats fold(Floats a, Floats b) {
    Ints low, high;
    for (int lane = 0; lane < LANES; lane++) {
        const int block = lane / (WIDTH / 2), from = block / 2 * WIDTH + lane % (WIDTH / 2);
        low[lane] = from + (block % 2 ? LANES : 0);
        high[lane] = low[lane] + WIDTH / 2;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

template <int WIDTH>
static inline void fold_all(Floats* v) {
    if constexpr (WIDTH > 1) {
        constexpr int half = WIDTH / 2;
        for (int i = 0; i < half; i++) v[i] = fold<WIDTH>(v[i], v[i + half]);
        fold_all<half>(v);
    }
}

// q . k_j for LANES keys, each summed over its lanes in the same order as alone.
static inline __attribute__((always_inline)) Floats dot_keys(const float* q, const float* keys, int64_t dim) {
    Floats acc[LANES];
    for (int j = 0; j < LANES; j++) acc[j] = Floats{};
    for (int64_t d = 0; d < dim; d += LANES) {
        const Floats x = load(q + d);
        for (int j = 0; j < LANES; j++) acc[j] += x * load(keys + j * dim + d);
    }
    fold_all<LANES>(acc);
    return acc[0];
}

// out[d] += sum_j weights[j] * v_j[d]
static inline __attribute__((always_inline)) void add_values(
    const float* weights, const float* values, int64_t count, int64_t dim, float* out
) {
    constexpr int WIDE = 4;
    int64_t d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES) {
        // Even and odd keys apart: that halves the chain of dependent additions.
        Floats even[WIDE], odd[WIDE] = {};
        for (int i = 0; i < WIDE; i++) even[i] = load(out + d + i * LANES);
        int64_t j = 0;
        for (; j + 2 <= count; j += 2) {
            const Floats a = broadcast(weights[j]), b = broadcast(weights[j + 1]);
            for (int i = 0; i < WIDE; i++) {
                even[i] += a * load(values + j * dim + d + i * LANES);
                odd[i] += b * load(values + (j + 1) * dim + d + i * LANES);
            }
        }
        if (j < count)
            for (int i = 0; i < WIDE; i++) even[i] += broadcast(weights[j]) * load(values + j * dim + d + i * LANES);
        for (int i = 0; i < WIDE; i++) store(out + d + i * LANES, even[i] + odd[i]);
    }
    for (; d < dim; d += LANES) {
        Floats sum = load(out + d);
        for (int64_t j = 0; j < count; j++) sum += broadcast(weights[j]) * load(values + j * dim + d);
        store(out + d, sum);
    }
}

// One query's running softmax over blocks of keys.
struct Running {
    float peak = -INFINITY, total = 0;
};

// Keys `from ... to - 1` of one block, given its first BLOCK rows of keys and values. DIM is the head's width where
// the compiler should know it, else 0.
template <int DIM>
static void take_block(
    Running& state, const float* q, const float* keys, const float* values, int64_t from, int64_t to,
    const Shape& shape, float* out
) {
    const int64_t dim = DIM ? DIM : shape.dim;
    float scores[BLOCK] __attribute__((aligned(64)));
    Floats best = broadcast(-INFINITY);
    for (int64_t j = from / LANES * LANES; j < to; j += LANES) {
        Ints place;
        for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
        place += (int32_t)j;
        const Ints seen = (place >= (int32_t)from) & (place < (int32_t)to);
        const Floats score = dot_keys(q, keys + j * dim, dim) * shape.scaling;
        const Floats kept = seen ? score : broadcast(-INFINITY);
        store(scores + j, kept);
        best = maximum(kept, best);
    }
    const float peak = std::max(state.peak, max_lanes(best));
    if (state.peak != peak) {
        const float rescale = state.peak == -INFINITY ? 0.0f : expf(state.peak - peak);
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) * rescale);
        state.total *= rescale;
        state.peak = peak;
    }
    Floats total = {};
    for (int64_t j = from / LANES * LANES; j < to; j += LANES) {
        const Floats weight = exponential(load(scores + j) - peak);
        store(scores + j, weight);
        total += weight;
    }
    state.total += sum_lanes(total);
    add_values(scores + from, values + from * dim, to - from, dim, out);
}

struct Span {
    int64_t start, stop;
};

// Positions that a token at `position` sees.
static inline Span seen_from(int64_t position, int64_t window) {
    return {window ? std::max<int64_t>(0, position - window + 1) : 0, position + 1};
}

// One cluster and one head of keys and values. query [N][heads][dim] with `stride` floats a token, out
// [N][heads][dim].
template <typename KV>
static void attend_cluster(
    const Shape& shape, const Plane<KV>& keys, const Plane<KV>& values, const Cluster& cluster, int64_t head,
    const int32_t* slots, const int32_t* positions, const float* query, int64_t stride, float* out,
    std::vector<float>& space
) {
    const int64_t dim = shape.dim, group = shape.heads / shape.kv_heads;
    const auto take = dim == 64 ? take_block<64> : dim == 128 ? take_block<128> : take_block<0>;
    space.resize(2 * BLOCK * dim);
    std::vector<Running> states(cluster.count * group);
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t i = 0; i < cluster.count; i++) {
        const int64_t row = cluster.first + i;
        const Span span = seen_from(positions[row], shape.window);
        begin = std::min(begin, span.start / BLOCK * BLOCK);
        end = std::max(end, span.stop);
        memset(out + (row * shape.heads + head * group) * dim, 0, group * dim * sizeof(float));
    }
    for (int64_t block = begin; block < end; block += BLOCK) {
        const float *k = nullptr, *v = nullptr;
        int64_t held = -1;  // the slot whose block k and v are
        for (int64_t i = 0; i < cluster.count; i++) {
            const int64_t row = cluster.first + i;
            const Span span = seen_from(positions[row], shape.window);
            const int64_t from = std::max(span.start, block), to = std::min(span.stop, block + BLOCK);
            if (from >= to) continue;
            const int64_t slot = slots[block + BLOCK <= cluster.shared ? cluster.first : row];
            if (slot != held) {
                // Whole vectors of keys are read: a plane has rows to spare behind its last position.
                const int64_t rows = std::min((std::min(end, block + BLOCK) - block + LANES - 1) / LANES * LANES, BLOCK);
                k = as_floats(keys.row(slot, head, block, dim), rows * dim, space.data());
                v = as_floats(values.row(slot, head, block, dim), rows * dim, space.data() + BLOCK * dim);
                held = slot;
                if (block + BLOCK < span.stop) {
                    bring_near(keys.row(slot, head, block + BLOCK, dim), std::min(span.stop - block - BLOCK, BLOCK) * dim);
                    bring_near(values.row(slot, head, block + BLOCK, dim), std::min(span.stop - block - BLOCK, BLOCK) * dim);
                }
            }
            for (int64_t g = 0; g < group; g++) {
                const int64_t place = row * shape.heads + head * group + g;
                take(
                    states[i * group + g], query + row * stride + (head * group + g) * dim, k, v, from - block,
                    to - block, shape, out + place * dim
                );
            }
        }
    }
    for (int64_t i = 0; i < cluster.count * group; i++) {
        const int64_t place = (cluster.first + i / group) * shape.heads + head * group + i % group;
        const float inverse = 1.0f / states[i].total;
        for (int64_t d = 0; d < dim; d += LANES) store(out + place * dim + d, load(out + place * dim + d) * inverse);
    }
}
