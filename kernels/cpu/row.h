// A row of logits, and what is looked for in it: its best tokens, and where in their order a sum reaches a target.
//
// The row is read once for the maxima of its spans of tokens. Whatever is looked for afterwards, a span is passed over
// where its maximum says that it cannot matter, which leaves little to do in a row of a language model. NaN takes part
// in no comparison and is left out by that.
#pragma once

#include <algorithm>
#include <cfloat>
#include <functional>
#include <vector>

#include "noise.h"
#include "simd.h"

namespace manta {

constexpr float INF = __builtin_inff();
constexpr int64_t WINDOW = 256;  // so few tokens are put in order one by one

struct Candidate {
    float logit;
    int32_t id;
};

// The order of tokens.
inline bool better(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Bit i says whether lane i of a comparison holds.
inline uint32_t lanes_of(vint holds) {
    uint32_t bits = 0;
#if defined(__AVX512F__)
    bits = _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds);
#elif defined(__AVX2__)
    __m256 halves[2];
    memcpy(halves, &holds, sizeof holds);
    for (int i = 0; i < 2; i++) bits |= uint32_t(_mm256_movemask_ps(halves[i])) << 8 * i;
#else
    for (int i = 0; i < LANES; i++) bits |= uint32_t(holds[i] & 1) << i;
#endif
    return bits;
}

// x >= bound. Where vectors are wider than the registers, the compiler's own comparison goes lane by lane.
inline vint at_least(vfloat x, float bound) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256 halves[2];
    memcpy(halves, &x, sizeof x);
    for (auto& half : halves) half = _mm256_cmp_ps(half, _mm256_set1_ps(bound), _CMP_GE_OQ);
    vint holds;
    memcpy(&holds, halves, sizeof holds);
    return holds;
#else
    return x >= bound;
#endif
}

class Row {
   public:
    // +inf counts as the largest number.
    void read(const float* logits, int64_t vocab) {
        logits_ = logits;
        whole_spans_ = vocab / SPAN;
        std::fill(tail_, tail_ + SPAN, -INF);
        std::copy(logits + whole_spans_ * SPAN, logits + vocab, tail_);
        maxima_.resize((vocab + SPAN - 1) / SPAN);
        vfloat best = splat(-INF);
        const int64_t count = spans();
        float* maxima = maxima_.data();
        for (int64_t s = 0; s < count; s++) {
            const float* from = s < whole_spans_ ? logits + s * SPAN : tail_;
            vfloat most = splat(-INF);
            for (int v = 0; v < VECTORS; v++) most = vmax(load(from + v * LANES), most);
            maxima[s] = reduce_max(most);
            best = vmax(most, best);
        }
        best_ = reduce_max(best);
        if (best_ == INF) {
            finite_.assign(logits, logits + vocab);
            std::replace(finite_.begin(), finite_.end(), INF, FLT_MAX);
            read(finite_.data(), vocab);
        }
    }

    // Scaled logits are differences from the best one, divided by the temperature. A token weighs their exponential,
    // and nothing below the floor.
    void scale(float temperature, float floor) {
        temperature_ = temperature;
        floor_ = floor;
    }

    // Weighs all tokens, right to about 1e-7. Returns what they weigh together.
    double weigh() {
        weights_.resize(spans() * SPAN);
        const int64_t count = spans();
        Sum sum;
        for (int64_t s = 0; s < count; s++) {
            vfloat part = {};
            for (int v = 0; v < VECTORS; v++) {
                const vfloat x = scaled(load(span(s) + v * LANES));
                const vfloat weight = (vfloat)(at_least(x, floor_) & (vint)vexp(x));
                store(weights_.data() + s * SPAN + v * LANES, weight);
                part += weight;
            }
            sum.add(part);
        }
        return sum.total();
    }

    bool usable() const { return best_ > -INF; }
    float best() const { return best_; }
    float logit(int64_t id) const { return logits_[id] >= -FLT_MAX ? logits_[id] : -INF; }
    int64_t spans() const { return int64_t(maxima_.size()); }
    const float* span(int64_t s) const { return s < whole_spans_ ? logits_ + s * SPAN : tail_; }
    float maximum(int64_t s) const { return maxima_[s]; }

    template <class T>
    T scaled(T logit) const {
        return (logit - best_) / temperature_;
    }

    // A token's weight, exactly.
    double weight(float logit) const { return scaled(logit) >= floor_ ? std::exp(double(scaled(logit))) : 0; }

    // The best token, the lowest of equals.
    int64_t best_id() const {
        const int64_t s = std::find(maxima_.begin(), maxima_.end(), best_) - maxima_.begin();
        return s * SPAN + (std::find(span(s), span(s) + SPAN, best_) - span(s));
    }

    // The tokens from a logit on.
    struct Part {
        int64_t count = 0;
        double amount = 0;  // WEIGHED: their weight, after weigh(); else their count once more
    };

    template <bool WEIGHED>
    Part from(float bound) const {
        Part part;
        vint count = {};
        Sum sum;
        const int64_t all = spans();
        for (int64_t s = 0; s < all; s++) {  // none is passed over: with jumps this loop takes longer
            vfloat weights = {};
            for (int v = 0; v < VECTORS; v++) {
                const vint reached = at_least(load(span(s) + v * LANES), bound);
                count -= reached;
                if (WEIGHED) weights += (vfloat)(reached & (vint)load(weights_.data() + s * SPAN + v * LANES));
            }
            if (WEIGHED) sum.add(weights);
        }
        for (int i = 0; i < LANES; i++) part.count += count[i];
        part.amount = WEIGHED ? sum.total() : double(part.count);
        return part;
    }

    // The tokens with logits in [low, high); `before` is the amount of the better ones.
    struct Stretch {
        float low = -INF, high = INF;
        double before = 0;
    };

    // Where in the order of tokens their amounts, added up, reach a target: among few tokens, or among equal ones.
    // False where even all finite ones do not reach it.
    //
    // likely: how many tokens will probably do.
    //
    // Source: Dowell and Jarratt 1971 (the Illinois method).
    template <bool WEIGHED>
    bool find(double target, int64_t likely, Stretch& stretch) {
        stretch = {};
        int64_t count_before = 0;
        double missing = target, surplus = 0;  // at the stretch's ends
        float bound = best_maximum(likely);
        bool enough = false;
        for (int turn = 1;; turn++) {
            const Part part = from<WEIGHED>(bound);
            const bool again = enough == (part.amount >= target);
            enough = part.amount >= target;
            if (enough) {
                stretch.low = bound;
                surplus = part.amount - target;
                if (again) missing /= 2;
                if (part.count - count_before <= WINDOW) return true;
            } else if (bound == -FLT_MAX) {
                return false;
            } else {
                stretch.high = bound;
                stretch.before = part.amount;
                count_before = part.count;
                missing = target - part.amount;
                if (again) surplus /= 2;
            }
            if (stretch.low == -INF) {  // twice as far from the best; a model's logits are soon passed in this way
                bound = turn > 5 ? -FLT_MAX : std::max(bound - std::max(best_ - bound, 1.0f), -FLT_MAX);
            } else {
                const float lowest = std::nextafter(stretch.low, INF), highest = std::nextafter(stretch.high, -INF);
                if (lowest > highest) return true;
                // Now and then in the middle: an amount that is just the target would draw the bounds to one side.
                const double share = turn % 3 ? missing / (missing + surplus) : 0.5;
                const double top = std::min(stretch.high, best_);
                bound = std::clamp(float(top + (stretch.low - top) * share), lowest, highest);
            }
        }
    }

    // The tokens with logits in [low, high), by id.
    std::vector<Candidate>& collect(float low, float high) {
        candidates_.clear();
        for (int64_t s = 0; s < spans(); s++) {
            if (maxima_[s] < low) continue;
            for (int v = 0; v < VECTORS; v++) {
                const vfloat logit = load(span(s) + v * LANES);
                for (uint32_t lanes = lanes_of(at_least(logit, low) & ~at_least(logit, high)); lanes; lanes &= lanes - 1) {
                    const int lane = __builtin_ctz(lanes);
                    candidates_.push_back({logit[lane], int32_t(s * SPAN + v * LANES + lane)});
                }
            }
        }
        return candidates_;
    }

    // The ids of the k best tokens, k up to the vocabulary's size; impossible ones last, by id.
    void best_tokens(int64_t k, int32_t* ids) {
        Stretch stretch;
        const bool enough = find<false>(double(k), k, stretch);
        auto& found = collect(enough ? stretch.low : -FLT_MAX, INF);
        const int64_t count = std::min(k, int64_t(found.size()));
        std::partial_sort(found.begin(), found.begin() + count, found.end(), better);
        for (int64_t i = 0; i < count; i++) ids[i] = found[i].id;
        for (int64_t i = count, id = 0; i < k; id++)
            if (logit(id) == -INF) ids[i++] = int32_t(id);
    }

   private:
    // Lanes added up in double precision.
    class Sum {
       public:
        void add(vfloat x) { lanes_ += __builtin_convertvector(x, vdouble); }

        double total() const {
            double total = 0;
            for (int i = 0; i < LANES; i++) total += lanes_[i];
            return total;
        }

       private:
        typedef double vdouble __attribute__((vector_size(128)));
        vdouble lanes_ = {};
    };

    // The k-th best of the spans' maxima, which k tokens reach at least; for a large k one that fewer may reach.
    float best_maximum(int64_t k) {
        k = std::clamp<int64_t>(k, 1, std::max<int64_t>(1, spans() / 2));
        scratch_ = maxima_;
        std::nth_element(scratch_.begin(), scratch_.begin() + (k - 1), scratch_.end(), std::greater<float>());
        return std::max(scratch_[k - 1], -FLT_MAX);
    }

    const float* logits_ = nullptr;
    int64_t whole_spans_ = 0;
    float tail_[SPAN];  // the last tokens, where they do not fill a span
    float best_ = -INF, temperature_ = 1, floor_ = -INF;
    std::vector<float> maxima_, weights_, scratch_, finite_;
    std::vector<Candidate> candidates_;
};

}  // namespace manta
