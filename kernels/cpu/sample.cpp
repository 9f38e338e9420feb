// Draws the next tokens of a batch of rows of logits, by the rule that engine/sampling/sampler.py states.
//
// Rows share nothing; threads take them one by one. No result depends on the other rows or on the number of threads.
#include <atomic>
#include <memory>

#include "pool.h"
#include "row.h"

namespace manta {

constexpr float SLACK = 1e-4f;         // far above the rounding errors of a score, far below what lets many tokens through
constexpr int64_t LIKELY_NUCLEUS = 64;  // tokens that often reach top_p

// One request's parameters; the binding in kernels/cpu/sampling_library.py has the same order and says what they are.
struct SamplingRow {
    float temperature;
    float repetition;
    int64_t top_k;
    double top_p, min_p;
    uint64_t seed;
    int64_t logprobs;
    int64_t min_length;
    const int64_t* stop_ids;
    int64_t stops;
    const int64_t* bias_ids;
    const float* bias_values;
    int64_t biases;
    const int64_t* seen_ids;
    const float* frequency_losses;
    const float* presence_losses;
    int64_t seen;
};

struct SamplingBatch {
    int64_t rows;
    int64_t vocab;
    const float* logits;        // [rows, vocab]
    const SamplingRow* params;  // of all requests
    const int64_t* places;      // [rows], each row's place in params
    const int64_t* num_tokens;  // [rows]
    int64_t* token_ids;         // [rows], to fill like all below
    uint8_t* broken;            // [rows]
    int64_t columns;            // 1 + the most alternatives that a row asks for
    int32_t* logprob_ids;       // [rows, columns]
    float* logprobs;            // [rows, columns]
    int32_t* ranks;             // [rows]
};

// What the filters leave: tokens up to `last` in the order of tokens whose scaled logit reaches the floor.
struct Cut {
    Candidate last{-INF, INT32_MAX};
    float floor = -INF;
};

class Sampler {
   public:
    void sample(const SamplingBatch& batch, int64_t i) {
        const SamplingRow& params = batch.params[batch.places[i]];
        const float* raw = batch.logits + i * batch.vocab;
        const float* logits = adjust(params, batch.num_tokens[i], raw, batch.vocab);
        row_.read(logits, batch.vocab);
        batch.broken[i] = !row_.usable();
        batch.token_ids[i] = !row_.usable()           ? 0
                             : params.temperature > 0 ? draw(params, batch.vocab, uint32_t(batch.num_tokens[i]))
                                                      : row_.best_id();
        if (params.logprobs < 0) return;
        if (logits != raw) row_.read(raw, batch.vocab);
        int32_t* ids = batch.logprob_ids + i * batch.columns;
        ids[0] = int32_t(batch.token_ids[i]);
        report(ids, batch.logprobs + i * batch.columns, 1 + std::min(params.logprobs, batch.vocab), batch.ranks[i]);
    }

   private:
    // The row after min_tokens, logit_bias and penalties, in that order.
    const float* adjust(const SamplingRow& params, int64_t num_tokens, const float* raw, int64_t vocab) {
        const bool may_stop = num_tokens >= params.min_length;
        if (may_stop && !params.biases && !params.seen) return raw;
        adjusted_.assign(raw, raw + vocab);
        float* logits = adjusted_.data();
        if (!may_stop)
            for (int64_t i = 0; i < params.stops; i++) logits[params.stop_ids[i]] = -INF;
        for (int64_t i = 0; i < params.biases; i++) logits[params.bias_ids[i]] += params.bias_values[i];
        if (params.repetition != 1)
            for (int64_t i = 0; i < params.seen; i++) {
                float& logit = logits[params.seen_ids[i]];
                logit = logit > 0 ? logit / params.repetition : logit * params.repetition;
            }
        // In a loop of its own: compilers fuse a product and a difference, which rounds them differently.
        for (int64_t i = 0; i < params.seen; i++) {
            float& logit = logits[params.seen_ids[i]];
            logit = logit - params.frequency_losses[i] - params.presence_losses[i];
        }
        return logits;
    }

    int64_t draw(const SamplingRow& params, int64_t vocab, uint32_t position) {
        const Cut cut = filter(params, vocab);
        vint bits[VECTORS];
        int64_t winner = row_.best_id();
        random_bits(params.seed, position, winner / SPAN, bits);
        float score = gumbel_of_bits(bits[winner % SPAN / LANES][winner % LANES]);
        for (int64_t s = 0; s < row_.spans(); s++) {
            if (row_.maximum(s) < cut.last.logit) continue;
            if (row_.scaled(row_.maximum(s)) < std::max(cut.floor, score - (GUMBEL_MAX + SLACK))) continue;
            random_bits(params.seed, position, s, bits);
            // Cheap tests leave few logarithms to be computed: -log u >= 1 - u, so that scaled - log(-log u) can reach
            // the score only where 1 - u <= exp(scaled - score). First with the best of the scaled logits, for all.
            const float hope = std::exp(row_.scaled(row_.maximum(s)) - score) * (1 + SLACK);
            const int32_t least = int32_t(std::max(0.0f, 8388607.0f - hope * 0x1p23f));
            vint hopeful = {};
            for (int v = 0; v < VECTORS; v++) hopeful |= bits[v] >= least;
            if (!lanes_of(hopeful)) continue;
            for (int v = 0; v < VECTORS; v++) {
                const vfloat logit = load(row_.span(s) + v * LANES), scaled = row_.scaled(logit);
                const vfloat rest = (8388607.5f - __builtin_convertvector(bits[v], vfloat)) * 0x1p-23f;
                const vfloat reach = vexp(scaled - score) * (1 + SLACK);
                const vint rivals = (rest <= reach) & (logit >= cut.last.logit) & (scaled >= cut.floor);
                for (uint32_t lanes = lanes_of(rivals); lanes; lanes &= lanes - 1) {
                    const int lane = __builtin_ctz(lanes);
                    const int64_t id = s * SPAN + v * LANES + lane;
                    if (better(cut.last, {logit[lane], int32_t(id)})) continue;
                    const float rival = scaled[lane] + gumbel_of_bits(bits[v][lane]);
                    if (rival > score || (rival == score && id < winner)) {
                        score = rival;
                        winner = id;
                    }
                }
            }
        }
        return winner;
    }

    // See engine/sampling/candidates.py for what each filter keeps.
    Cut filter(const SamplingRow& params, int64_t vocab) {
        Cut cut;
        if (params.min_p > 0) cut.floor = lowest_scaled(params.min_p);
        row_.scale(params.temperature, cut.floor);
        Row::Stretch stretch;
        if (params.top_k < vocab && row_.find<false>(double(params.top_k), params.top_k, stretch)) {
            auto& kept = row_.collect(stretch.low, stretch.high);
            const auto last = kept.begin() + (params.top_k - int64_t(stretch.before) - 1);
            std::nth_element(kept.begin(), last, kept.end(), better);
            cut.last = *last;
            kept.erase(last + 1, kept.end());
            if (params.top_p < 1) {
                if (stretch.before > 0) row_.weigh();
                const double before = stretch.before > 0 ? row_.from<true>(stretch.high).amount : 0;
                double total = before;
                for (const Candidate& candidate : kept) total += row_.weight(candidate.logit);
                const double target = params.top_p * total;
                cut.last = before < target ? edge(kept, before, target) : nucleus(target);
            }
        } else if (params.top_p < 1) {
            cut.last = nucleus(params.top_p * row_.weigh());
        }
        return cut;
    }

    // The token with which the best tokens' weights, added up, reach a target.
    Candidate nucleus(double target) {
        Row::Stretch stretch;
        if (!row_.find<true>(target, LIKELY_NUCLEUS, stretch)) return Cut().last;
        return edge(row_.collect(stretch.low, stretch.high), stretch.before, target);
    }

    // The same among tokens that follow others of a known weight. They need no full sort: few are mostly enough.
    Candidate edge(std::vector<Candidate>& tokens, double reached, double target) {
        const auto worse = [](const Candidate& a, const Candidate& b) { return better(b, a); };
        std::make_heap(tokens.begin(), tokens.end(), worse);
        while ((reached += row_.weight(tokens.front().logit)) < target && tokens.size() > 1) {
            std::pop_heap(tokens.begin(), tokens.end(), worse);
            tokens.pop_back();
        }
        return tokens.front();
    }

    // The least float whose exponential is min_p or more: found by the bits of its absolute value, which have its order.
    static float lowest_scaled(double min_p) {
        const auto scaled = [](uint32_t bits) {
            float size;
            memcpy(&size, &bits, 4);
            return -size;
        };
        uint32_t enough = 0, too_far = 0x44800000;  // 0 and 1024
        while (too_far - enough > 1) {
            const uint32_t middle = (enough + too_far) / 2;
            (std::exp(double(scaled(middle))) >= min_p ? enough : too_far) = middle;
        }
        return scaled(enough);
    }

    // The log-probabilities of ids[0] and of the best tokens, which become ids[1 ... count - 1]; and the rank of ids[0].
    void report(int32_t* ids, float* logprobs, int64_t count, int32_t& rank) {
        row_.best_tokens(count - 1, ids + 1);
        rank = 1 + int32_t(row_.from<false>(std::nextafter(row_.logit(ids[0]), INF)).count);
        row_.scale(1, -INF);
        const float total = row_.usable() ? float(std::log(row_.weigh())) : 0;
        for (int64_t i = 0; i < count; i++)
            logprobs[i] = row_.usable() ? row_.logit(ids[i]) - row_.best() - total : -INF;
    }

    Row row_;
    std::vector<float> adjusted_;
};

}  // namespace manta

#define MANTA_API extern "C" __attribute__((visibility("default")))

MANTA_API int64_t manta_sampling_row_bytes() { return sizeof(manta::SamplingRow); }
MANTA_API int64_t manta_sampling_batch_bytes() { return sizeof(manta::SamplingBatch); }

namespace {
// One step's rows; each is a piece of work.
class SampleRows : public manta::Job {
   public:
    SampleRows(int threads, const manta::SamplingBatch& batch) : threads_(threads), batch_(batch) {}

    void work() override {
        thread_local auto sampler = std::make_unique<manta::Sampler>();
        rows_.run(batch_.rows, threads_, {1, 1}, [&](int64_t row, int64_t, int64_t) { sampler->sample(batch_, row); });
    }

   private:
    const int threads_;
    const manta::SamplingBatch batch_;
    manta::Pieces rows_;
};
}  // namespace

MANTA_API void manta_sample(void* pool, const manta::SamplingBatch* batch) {
    auto& threads = *static_cast<manta::Pool*>(pool);
    const auto job = std::make_shared<SampleRows>(threads.threads(), *batch);
    if (batch->rows == 1)  // the others would only be woken to find nothing
        job->work();
    else
        threads.run(job);
}

// The noise of given bits, by which tests compare it with its definition.
MANTA_API void manta_gumbel_of_bits(const int32_t* bits, float* noise, int64_t count) {
    for (int64_t i = 0; i < count; i++) noise[i] = manta::gumbel_of_bits(bits[i]);
}
