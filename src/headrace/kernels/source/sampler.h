// Draws one token per row of logits by inverting the cumulative distribution: two passes over the row.
#pragma once

#include <vector>

#include "vector.h"

constexpr int64_t PART = 1024;  // logits whose weights are summed before the running total

// exp((logit - peak) * inverse) for the logits of one part, and their sum.
static inline double part_weights(const float* logits, int64_t count, float peak, float inverse, float* weights) {
    Floats total = {};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        const Floats weight = exponential((load(logits + j) - peak) * inverse);
        store(weights + j, weight);
        total += weight;
    }
    double sum = sum_lanes(total);
    for (; j < count; j++) {
        const Floats weight = exponential(broadcast((logits[j] - peak) * inverse));
        weights[j] = weight[0];
        sum += weight[0];
    }
    return sum;
}

// A temperature of 0 takes the first most likely token and reports its log-prob at temperature 1. A row whose
// logits are not all finite (-inf is allowed) gets a log-prob of NaN.
static inline void draw(
    const float* logits, int64_t vocabulary, float temperature, double uniform, int64_t* id, double* logprob
) {
    Floats best = broadcast(-INFINITY), worst = {};
    int64_t j = 0;
    for (; j + LANES <= vocabulary; j += LANES) {
        const Floats x = load(logits + j);
        best = maximum(x, best);
        worst += x * 0.0f;  // NaN for NaN and for infinities
    }
    float peak = max_lanes(best);
    for (; j < vocabulary; j++) peak = logits[j] > peak ? logits[j] : peak;
    *id = 0;
    *logprob = NAN;
    if (sum_lanes(worst) != 0) {
        for (j = 0; j < vocabulary; j++)
            if (!(logits[j] < INFINITY)) return;
    }
    if (!std::isfinite(peak)) return;
    const float inverse = temperature > 0 ? 1.0f / temperature : 1.0f;
    const int64_t parts = (vocabulary + PART - 1) / PART;
    std::vector<double> sums(parts);
    float weights[PART];
    double total = 0;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part * PART, count = std::min(PART, vocabulary - first);
        sums[part] = part_weights(logits + first, count, peak, inverse, weights);
        total += sums[part];
    }
    if (!std::isfinite(total)) return;
    int64_t chosen = -1;
    if (temperature > 0) {
        const double target = uniform * total;
        double before = 0;
        for (int64_t part = 0; part < parts && chosen < 0; part++) {
            // Rounding can lift the target onto the total; the last token with weight is then the right one.
            bool last = true;
            for (int64_t rest = part + 1; rest < parts && last; rest++) last = sums[rest] <= 0;
            if (before + sums[part] <= target && !last) {
                before += sums[part];
                continue;
            }
            const int64_t first = part * PART, count = std::min(PART, vocabulary - first);
            part_weights(logits + first, count, peak, inverse, weights);
            double reached = before;
            for (int64_t i = 0; i < count; i++) {
                if (!(weights[i] > 0)) continue;
                chosen = first + i;
                reached += weights[i];
                if (reached > target) break;
            }
        }
    } else {
        for (j = 0; j < vocabulary && chosen < 0; j++)
            if (logits[j] == peak) chosen = j;
    }
    *id = chosen;
    *logprob = (double)(logits[chosen] - peak) * inverse - log(total);
}
