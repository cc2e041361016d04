// Y = X W^T with weights prepacked in panels of TILE_COLUMNS outputs.
//
// A row's result depends on that row and the weights alone, in every bit: products are summed over K in one
// fixed order, whatever number of rows or threads there is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "team.h"
#include "vector.h"

// A linear layer, packed. With `scale` it is int8: weight holds w / scale + 128 as bytes in [1, 255], and inputs
// are multiplied by `smooth` before they are quantised.
struct Linear {
    const void* weight;   // panels [K][TILE_COLUMNS] float, or [K / 4][TILE_COLUMNS][4] bytes
    const float* bias;    // [N] or null
    const float* scale;   // [N], or null for float
    const float* smooth;  // [K], or null for float
    int64_t outputs, inputs;
};

// Inputs of a linear layer: float rows, or int8 rows with a scale and a sum each.
struct Inputs {
    const float* rows;      // [M][inputs]
    const int8_t* bytes;    // [M][padded inputs]
    const float* scales;    // [M]
    const int32_t* sums;    // [M], sums of the bytes
};

static inline int64_t padded_inputs(int64_t inputs) { return (inputs + 3) / 4 * 4; }
static inline int64_t panels(int64_t outputs) { return (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS; }

static inline int64_t panel_bytes(const Linear& linear) {
    return linear.scale ? padded_inputs(linear.inputs) * TILE_COLUMNS : linear.inputs * TILE_COLUMNS * 4;
}

// While a tile is computed, the memory behind `ahead` is brought near: that many bytes over the whole tile.
struct Ahead {
    const char* next;
    int64_t bytes;
};

static inline void prefetch(Ahead& ahead, int64_t count) {
    for (; count > 0 && ahead.bytes > 0; count -= 64, ahead.next += 64, ahead.bytes -= 64)
        __builtin_prefetch(ahead.next, 0, 2);
}

template <int ROWS>
static inline void tile_float(
    const float* x, int64_t stride, const float* w, int64_t inputs, Ahead ahead, Floats (&out)[ROWS][TILE_VECTORS]
) {
    Floats acc[ROWS][TILE_VECTORS] = {};  // its own, so that it stays in registers
    const int64_t share = inputs ? (ahead.bytes * 8 / inputs + 63) / 64 * 64 : 0;
    for (int64_t k = 0; k < inputs; k++) {
        if (k % 8 == 0) prefetch(ahead, share);
        Floats b[TILE_VECTORS];
        for (int c = 0; c < TILE_VECTORS; c++) b[c] = load(w + k * TILE_COLUMNS + c * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Floats a = broadcast(x[r * stride + k]);
            for (int c = 0; c < TILE_VECTORS; c++) acc[r][c] += a * b[c];
        }
    }
    memcpy(out, acc, sizeof(acc));
}

template <int ROWS>
static inline void tile_int8(
    const int8_t* x, int64_t stride, const uint8_t* w, int64_t quads, Ahead ahead, Ints (&out)[ROWS][TILE_VECTORS]
) {
    Ints acc[ROWS][TILE_VECTORS] = {};
    const int64_t share = quads ? (ahead.bytes * 8 / quads + 63) / 64 * 64 : 0;
    for (int64_t k = 0; k < quads; k++) {
        if (k % 8 == 0) prefetch(ahead, share);
        Bytes b[TILE_VECTORS];
        for (int c = 0; c < TILE_VECTORS; c++)
            memcpy(&b[c], w + (k * TILE_COLUMNS + c * LANES) * 4, sizeof(Bytes));
        for (int r = 0; r < ROWS; r++) {
            int32_t x4;
            memcpy(&x4, x + r * stride + 4 * k, 4);
            for (int c = 0; c < TILE_VECTORS; c++) acc[r][c] = dot4(acc[r][c], b[c], x4);
        }
    }
    memcpy(out, acc, sizeof(acc));
}

template <int ROWS>
static void tile(
    const Linear& linear, const Inputs& in, int64_t row, int64_t panel, Ahead ahead, const float* add, float* out
) {
    Floats acc[ROWS][TILE_VECTORS];
    const char* weights = (const char*)linear.weight + panel * panel_bytes(linear);
    const int64_t column = panel * TILE_COLUMNS;
    if (linear.scale) {
        const int64_t stride = padded_inputs(linear.inputs);
        Ints sums[ROWS][TILE_VECTORS];
        tile_int8<ROWS>(
            in.bytes + row * stride, stride, (const uint8_t*)weights, stride / 4, ahead, sums
        );
        for (int r = 0; r < ROWS; r++) {
            const int32_t offset = 128 * in.sums[row + r];
            for (int c = 0; c < TILE_VECTORS; c++)
                acc[r][c] = __builtin_convertvector(sums[r][c] - offset, Floats) * in.scales[row + r];
        }
    } else {
        tile_float<ROWS>(
            in.rows + row * linear.inputs, linear.inputs, (const float*)weights, linear.inputs, ahead, acc
        );
    }
    const bool whole = column + TILE_COLUMNS <= linear.outputs;
    for (int r = 0; r < ROWS; r++) {
        const int64_t place = (row + r) * linear.outputs + column;
        if (whole) {
            for (int c = 0; c < TILE_VECTORS; c++) {
                const int64_t j = c * LANES;
                if (linear.scale) acc[r][c] *= load(linear.scale + column + j);
                if (linear.bias) acc[r][c] += load(linear.bias + column + j);
                if (add) acc[r][c] += load(add + place + j);
                store(out + place + j, acc[r][c]);
            }
        } else {
            for (int64_t j = 0; column + j < linear.outputs; j++) {
                float y = acc[r][j / LANES][j % LANES];
                if (linear.scale) y *= linear.scale[column + j];
                if (linear.bias) y += linear.bias[column + j];
                out[place + j] = add ? y + add[place + j] : y;
            }
        }
    }
}

static inline void tiles(
    int rows, const Linear& linear, const Inputs& in, int64_t row, int64_t panel, Ahead ahead, const float* add,
    float* out
) {
    switch (rows) {
        case 1: return tile<1>(linear, in, row, panel, ahead, add, out);
        case 2: return tile<2>(linear, in, row, panel, ahead, add, out);
        case 3: return tile<3>(linear, in, row, panel, ahead, add, out);
        case 4: return tile<4>(linear, in, row, panel, ahead, add, out);
#if defined(__AVX512F__)
        case 7: return tile<7>(linear, in, row, panel, ahead, add, out);
        case 8: return tile<8>(linear, in, row, panel, ahead, add, out);
#endif
#if !defined(__AVX2__) || defined(__AVX512F__)
        case 5: return tile<5>(linear, in, row, panel, ahead, add, out);
        case 6: return tile<6>(linear, in, row, panel, ahead, add, out);
#endif
    }
}

// out[m] = linear(in[m]) (+ add[m]) for m < count; `add` may be `out`. One thread's part of it.
static inline void apply_linear(
    const Member& member, const Linear& linear, const Inputs& in, int64_t count, const float* add, float* out
) {
    if (!count) return;
    const int64_t bytes = panel_bytes(linear), blocks = (count + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t share = bytes / blocks / 64 * 64 + 64;
    int64_t panel, last_panel;
    member.share(panels(linear.outputs), 1, &panel, &last_panel);
    for (; panel < last_panel; panel++) {
        // The next panel comes from memory while this one is computed.
        const char* next = (const char*)linear.weight + (panel + 1) * bytes;
        for (int64_t block = 0; block < blocks; block++) {
            // Rows are dealt out evenly, so that no block is much smaller than the others.
            const int64_t first = count * block / blocks, last = count * (block + 1) / blocks;
            const Ahead ahead = {next + block * share, panel + 1 < last_panel ? share : 0};
            tiles((int)(last - first), linear, in, first, panel, ahead, add, out);
        }
    }
}

// Copies W [rows][inputs] into the panels from output `column` on.
static inline void pack_float(
    const float* w, int64_t rows, int64_t inputs, int64_t column, float* packed, int threads
) {
    const int64_t first = column / TILE_COLUMNS, last = (column + rows - 1) / TILE_COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = first; panel <= last; panel++) {
        float* to = packed + panel * inputs * TILE_COLUMNS;
        const int64_t begin = std::max(column, panel * TILE_COLUMNS);
        const int64_t end = std::min(column + rows, (panel + 1) * TILE_COLUMNS);
        for (int64_t k0 = 0; k0 < inputs; k0 += 16) {
            const int64_t depth = std::min<int64_t>(16, inputs - k0);
            float block[16][TILE_COLUMNS];
            for (int64_t j = begin; j < end; j++) {
                const float* from = w + (j - column) * inputs + k0;
                for (int64_t k = 0; k < depth; k++) block[k][j - begin] = from[k];
            }
            for (int64_t k = 0; k < depth; k++)
                memcpy(to + (k0 + k) * TILE_COLUMNS + begin % TILE_COLUMNS, block[k], (end - begin) * sizeof(float));
        }
    }
}

// peaks[k] = max(peaks[k], |W[row][k]| over all rows); NaN is passed over.
static inline void column_peaks(const float* w, int64_t rows, int64_t inputs, float* peaks, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> found(inputs);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < inputs; k++) {
                const float x = fabsf(w[row * inputs + k]);
                found[k] = x > found[k] ? x : found[k];
            }
#pragma omp critical
        for (int64_t k = 0; k < inputs; k++) peaks[k] = std::max(peaks[k], found[k]);
    }
}

// Sixteen numbers to the nearest integers (ties to even), as bytes offset by 128.
static inline void to_offset_bytes(const float* x, float factor, uint8_t* out) {
    const float magic = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    for (int i = 0; i < 16; i++) {
        int32_t bits;
        const float shifted = x[i] * factor + magic;
        memcpy(&bits, &shifted, 4);
        out[i] = (uint8_t)(bits + 128);
    }
}

// Quantises W [rows][inputs], its columns divided by `smooth` first, to one scale per row.
static inline void pack_int8(
    const float* w, int64_t rows, int64_t inputs, int64_t column, const float* smooth, uint8_t* packed,
    float* scales, int threads
) {
    const int64_t padded = padded_inputs(inputs), blocks = (inputs + 15) / 16;
    std::vector<float> inverse(blocks * 16);
    for (int64_t k = 0; k < inputs; k++) inverse[k] = 1 / smooth[k];
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> row(blocks * 16);  // zeros behind the inputs
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const float* from = w + r * inputs;
            Floats best = {}, broken = {};
            for (int64_t k = 0; k < inputs; k++) row[k] = from[k] * inverse[k];
            for (int64_t k = 0; k < blocks * 16; k += LANES) {
                best = maximum(absolute(load(&row[k])), best);
                broken += load(&row[k]) * 0.0f;
            }
            const float peak = max_lanes(best);
            const bool finite = sum_lanes(broken) == 0;
            const int64_t j = column + r;
            // A weight that is not finite must not be rounded away.
            scales[j] = finite ? peak / 127 : NAN;
            const float factor = finite && peak > 0 ? 127 / peak : 0;
            if (!finite) std::fill(row.begin(), row.end(), 0.0f);
            uint8_t* to = packed + j / TILE_COLUMNS * padded * TILE_COLUMNS + j % TILE_COLUMNS * 4;
            for (int64_t block = 0; block < blocks; block++) {
                uint8_t bytes[16];
                to_offset_bytes(&row[block * 16], factor, bytes);
                for (int64_t q = 0; q < 4 && block * 16 + q * 4 < padded; q++)
                    memcpy(to + (block * 4 + q) * TILE_COLUMNS * 4, bytes + 4 * q, 4);
            }
        }
    }
}

constexpr int64_t GRADIENT_COLUMNS = 128 * TILE_ROWS;  // columns of G that are packed together: they stay in the cache

// Floats that `weight_gradient` needs as scratch.
static inline int64_t weight_gradient_scratch(int64_t m, int64_t n, int64_t k) {
    return panels(k) * TILE_COLUMNS * m + std::min(GRADIENT_COLUMNS, (n + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS) * m;
}

// out [n][k] = G^T X with G [m][n] and X [m][k]: a linear layer's weight gradient. One thread's part of it.
static inline void weight_gradient(
    Member& member, const float* g, const float* x, int64_t m, int64_t n, int64_t k, float* out, float* scratch
) {
    float* const packed_x = scratch;  // [panels][m][TILE_COLUMNS]
    float* const packed_g = scratch + panels(k) * TILE_COLUMNS * m;  // [blocks][m][TILE_ROWS]
    int64_t first_panel, last_panel, row, last_row;
    member.share(panels(k), 1, &first_panel, &last_panel);
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const int64_t column = panel * TILE_COLUMNS, width = std::min<int64_t>(TILE_COLUMNS, k - column);
        for (int64_t i = 0; i < m; i++) {
            float* to = packed_x + (panel * m + i) * TILE_COLUMNS;
            memcpy(to, x + i * k + column, width * sizeof(float));
            for (int64_t j = width; j < TILE_COLUMNS; j++) to[j] = 0;
        }
    }
    for (int64_t begin = 0; begin < n; begin += GRADIENT_COLUMNS) {
        const int64_t end = std::min(n, begin + GRADIENT_COLUMNS), blocks = (end - begin + TILE_ROWS - 1) / TILE_ROWS;
        member.barrier();  // nobody reads the columns before these any more
        for (member.share(m, 1, &row, &last_row); row < last_row; row++)
            for (int64_t block = 0; block < blocks; block++)
                for (int r = 0; r < TILE_ROWS; r++) {
                    const int64_t j = begin + block * TILE_ROWS + r;
                    packed_g[(block * m + row) * TILE_ROWS + r] = j < end ? g[row * n + j] : 0;
                }
        member.barrier();
        for (int64_t panel = first_panel; panel < last_panel; panel++) {
            const int64_t column = panel * TILE_COLUMNS, width = std::min<int64_t>(TILE_COLUMNS, k - column);
            const float* const panel_x = packed_x + panel * m * TILE_COLUMNS;
            for (int64_t block = 0; block < blocks; block++) {
                Floats acc[TILE_ROWS][TILE_VECTORS] = {};
                const float* const block_g = packed_g + block * m * TILE_ROWS;
                for (int64_t i = 0; i < m; i++) {
                    Floats b[TILE_VECTORS];
                    for (int c = 0; c < TILE_VECTORS; c++) b[c] = load(panel_x + i * TILE_COLUMNS + c * LANES);
                    for (int r = 0; r < TILE_ROWS; r++) {
                        const Floats a = broadcast(block_g[i * TILE_ROWS + r]);
                        for (int c = 0; c < TILE_VECTORS; c++) acc[r][c] += a * b[c];
                    }
                }
                float sums[TILE_ROWS][TILE_COLUMNS];
                memcpy(sums, acc, sizeof(acc));
                const int64_t height = std::min<int64_t>(TILE_ROWS, end - begin - block * TILE_ROWS);
                for (int64_t r = 0; r < height; r++)
                    memcpy(out + (begin + block * TILE_ROWS + r) * k + column, sums[r], width * sizeof(float));
            }
        }
    }
}
