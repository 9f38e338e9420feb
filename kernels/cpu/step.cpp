// Runs a step plan: a list of operations with their weights and buffers, over one flat batch, on all threads at once.
//
// A plan is made once for a model. Operations follow each other; within one, threads take pieces of work as they come.
// No result depends on the number of threads, nor on what else is in the batch.
#include <atomic>
#include <cmath>
#include <memory>

#include "attention.h"
#include "int8.h"
#include "pool.h"
#include "simd.h"

namespace manta {

constexpr int64_t ROW_TILE = 192;  // rows that a panel is applied to while it is in the cache

enum Kind : int64_t { EMBED, RMS_NORM, LINEAR, ROTATE_AND_STORE, ATTEND, EMBED_FROM_PANELS, QUANTIZE, GATHER };
enum Epilogue : int64_t { STORE, ADD_TO_RESIDUAL, SILU_AND_MULTIPLY, STORE_FLOAT };
enum Format : int64_t { PANELS, INT8, INT8_ACTIVATIONS };

// One operation. Which fields it reads follows from its kind; the binding in kernels/cpu/library.py has the same order.
struct Operation {
    int64_t kind;
    const void* input;    // [tokens, in_features]
    void* output;         // [tokens, out_features], or the float32 residual
    const void* weight;   // LINEAR: packed panels; EMBED: [vocab, size]; RMS_NORM: float32 [size]
    const float* bias;    // LINEAR: padded as the panels are; null is none
    int64_t in_features;
    int64_t out_features;  // LINEAR with SILU_AND_MULTIPLY: half of the panels' columns
    int64_t epilogue;
    float eps;
    float scale;
    void* key_cache;
    void* value_cache;
    const float* query_norm;  // float32 [head_dim]; null is none
    const float* key_norm;
    int64_t heads, kv_heads, head_dim;
    int64_t window;
    int64_t format;  // LINEAR: of the weight; with INT8_ACTIVATIONS the input is what QUANTIZE gave
    int64_t on_kept;  // not 0: its rows are the kept tokens, which GATHER has brought together
};

// What changes from step to step.
struct Batch {
    int64_t tokens;
    const int64_t* token_ids;
    const int64_t* slots;
    int64_t requests;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t table_stride;
    int64_t kept;  // tokens whose result is asked for
    const int64_t* kept_tokens;
    const float* cosines;  // [tokens, head_dim / 2]
    const float* sines;
};

template <class T>
class Step : public Job {
   public:
    Step(int threads, const Operation* operations, int64_t count, const Batch& batch)
        : threads_(threads), operations_(operations, operations + count), batch_(batch), pieces_(count) {
        for (int64_t i = 0; i < count && tile_start_.empty(); i++)
            if (operations[i].kind == ATTEND) cut_into_tiles(operations[i].heads / operations[i].kv_heads);
    }

    void work() override {
        thread_local auto scratch = std::make_unique<AttentionScratch<T>>();
        for (size_t i = 0; i < operations_.size(); i++) {
            const Operation& op = operations_[i];
            Pieces& pieces = pieces_[i];
            switch (op.kind) {
                case EMBED: embed(op, pieces); break;
                case RMS_NORM: rms_norm(op, pieces); break;
                case LINEAR: linear(op, pieces); break;
                case ROTATE_AND_STORE: rotate_and_store(op, pieces); break;
                case ATTEND: attention(op, pieces, *scratch); break;
                case EMBED_FROM_PANELS: embed_from_panels(op, pieces); break;
                case QUANTIZE: quantize_rows(op, pieces); break;
                case GATHER: gather(op, pieces); break;
            }
        }
    }

   private:
    int64_t rows_of(const Operation& op) const { return op.on_kept ? batch_.kept : batch_.tokens; }

    template <class Row>
    void each_row(const Operation& op, Pieces& pieces, Row row) {
        pieces.run(rows_of(op), threads_, {1, 16}, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t token = first; token < last; token++) row(token);
        });
    }

    void embed(const Operation& op, Pieces& pieces) {
        const T* table = static_cast<const T*>(op.weight);
        float* residual = static_cast<float*>(op.output);
        each_row(op, pieces, [&](int64_t token) {
            const T* from = table + batch_.token_ids[token] * op.out_features;
            float* to = residual + token * op.out_features;
            for (int64_t i = 0; i < op.out_features; i++) to[i] = to_float(from[i]);
        });
    }

    // Rows of in_features bytes.
    void gather(const Operation& op, Pieces& pieces) {
        each_row(op, pieces, [&](int64_t row) {
            memcpy(static_cast<char*>(op.output) + row * op.in_features,
                   static_cast<const char*>(op.input) + batch_.kept_tokens[row] * op.in_features, op.in_features);
        });
    }

    // Rows of a table that is packed as a product's weight: tied embeddings are held once.
    void embed_from_panels(const Operation& op, Pieces& pieces) {
        const int64_t size = op.out_features, steps = (size + STEP<T> - 1) / STEP<T>;
        float* residual = static_cast<float*>(op.output);
        each_row(op, pieces, [&](int64_t token) {
            const int64_t row = batch_.token_ids[token];
            const T* from =
                static_cast<const T*>(op.weight) + row / PANEL * steps * PANEL * STEP<T> + row % PANEL * STEP<T>;
            float* to = residual + token * size;
            for (int64_t i = 0; i < size; i++) to[i] = to_float(from[i / STEP<T> * PANEL * STEP<T> + i % STEP<T>]);
        });
    }

    void rms_norm(const Operation& op, Pieces& pieces) {
        const float* weight = static_cast<const float*>(op.weight);
        each_row(op, pieces, [&](int64_t token) {
            normalize(static_cast<const float*>(op.input) + token * op.in_features,
                      static_cast<T*>(op.output) + token * op.in_features, weight, op.in_features, op.eps);
        });
    }

    template <class From, class To>
    static void normalize(const From* from, To* to, const float* weight, int64_t size, float eps) {
        vfloat squares = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            vfloat x = load(from + i);
            squares += x * x;
        }
        float sum = reduce_add(squares);
        for (int64_t rest = i; rest < size; rest++) sum += to_float(from[rest]) * to_float(from[rest]);
        const float factor = 1.0f / std::sqrt(sum / float(size) + eps);
        for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(from + i) * factor * load(weight + i));
        for (; i < size; i++) assign(to[i], to_float(from[i]) * factor * weight[i]);
    }

    void linear(const Operation& op, Pieces& pieces) {
        const int64_t columns = op.epilogue == SILU_AND_MULTIPLY ? LANES : PANEL;  // of the output, in a panel
        const int64_t panels = (op.out_features + columns - 1) / columns;
        const int64_t rows = rows_of(op), row_tiles = (rows + ROW_TILE - 1) / ROW_TILE;
        // Panels of a span lie one behind the other in memory.
        const int64_t count = row_tiles * panels, most = std::max<int64_t>(2, panels);
        pieces.run(count, threads_, {2, most}, [&](int64_t first, int64_t last, int64_t next) {
            for (int64_t item = first; item < last; item++) {
                const int64_t first_row = item / panels * ROW_TILE;
                const int64_t last_row = std::min(first_row + ROW_TILE, rows);
                const int64_t after = item + 1 < last || next == count ? std::min(item + 1, count - 1) : next;
                apply(op, item % panels, after % panels, first_row, last_row);
            }
        });
    }

    // next: the panel that this thread needs afterwards.
    void apply(const Operation& op, int64_t panel, int64_t next, int64_t first_row, int64_t last_row) {
        switch (op.format) {
            case PANELS: apply_panel(op, panel, next, first_row, last_row); break;
            case INT8:
                apply_int8(op, panel, first_row, last_row, static_cast<const T*>(op.input), op.in_features);
                break;
            case INT8_ACTIVATIONS:
                apply_int8(op, panel, first_row, last_row, static_cast<const Int8Activations*>(op.input),
                           groups_of(op.in_features));
                break;
        }
    }

    // Meanwhile the next panel is fetched: all of it in one pass, or one half in each of the first two.
    void apply_panel(const Operation& op, int64_t panel, int64_t next, int64_t first_row, int64_t last_row) {
        const int64_t size = (op.in_features + STEP<T> - 1) / STEP<T> * STEP<T> * PANEL;
        const T* weight = static_cast<const T*>(op.weight);
        const T* ahead = weight + next * size;
        weight += panel * size;
        if (last_row - first_row <= MAX_ROWS)
            return product<MAX_ROWS, 2>(op, weight, ahead, panel, first_row, int(last_row - first_row));
        for (int64_t row = first_row; row < last_row;) {
            const int rows = rows_of_pass(last_row - row);
            product<MAX_ROWS, 1>(op, weight, ahead, panel, row, rows);
            ahead = row == first_row ? ahead + size / 2 : weight;
            row += rows;
        }
    }

    // a: rows of lda elements.
    template <class A>
    static void apply_int8(const Operation& op, int64_t panel, int64_t first_row, int64_t last_row, const A* a,
                           int64_t lda) {
        const Int8Weights* weights = static_cast<const Int8Weights*>(op.weight) + panel * groups_of(op.in_features);
        const float* bias = op.bias ? op.bias + panel * PANEL : nullptr;
        int8_product(a + first_row * lda, op.in_features, weights, bias, last_row - first_row,
                     [&](int64_t row, const vfloat (&sums)[2]) { finish(op, panel, first_row + row, sums); });
    }

    void quantize_rows(const Operation& op, Pieces& pieces) {
        each_row(op, pieces, [&](int64_t token) {
            quantize_row(static_cast<const T*>(op.input) + token * op.in_features, op.in_features,
                         static_cast<Int8Activations*>(op.output) + token * groups_of(op.in_features));
        });
    }

    // LINES: how many cache lines of `ahead` are fetched with each step.
    template <int ROWS, int LINES>
    void product(const Operation& op, const T* weight, const T* ahead, int64_t panel, int64_t row, int rows) {
        if constexpr (ROWS > 0) {
            if (rows < ROWS) return product<ROWS - 1, LINES>(op, weight, ahead, panel, row, rows);
            const int64_t steps = (op.in_features + STEP<T> - 1) / STEP<T>;
            const T* columns[2] = {weight, weight + LANES * STEP<T>};
            vfloat acc[ROWS][2];
            for (int v = 0; v < 2; v++) {
                vfloat start = op.bias ? load(op.bias + panel * PANEL + v * LANES) : vfloat{};
                for (int r = 0; r < ROWS; r++) acc[r][v] = start;
            }
            multiply(static_cast<const T*>(op.input) + row * op.in_features, op.in_features, columns, PANEL * STEP<T>,
                     steps, acc, [&](int64_t step) {
                         // To the second cache level: the first one is full of this panel.
                         for (int line = 0; line < LINES; line++)
                             __builtin_prefetch(ahead + (step * LINES + line) * LANES * STEP<T>, 0, 2);
                     });
            for (int r = 0; r < ROWS; r++) finish(op, panel, row + r, acc[r]);
        }
    }

    static void finish(const Operation& op, int64_t panel, int64_t row, const vfloat (&sums)[2]) {
        if (op.epilogue == SILU_AND_MULTIPLY) {
            vfloat gate = sums[0];
            vfloat gated = gate / (1.0f + vexp2<T>(gate * -LOG2_E)) * sums[1];
            put(static_cast<T*>(op.output) + row * op.out_features, gated, panel * LANES, op.out_features);
            return;
        }
        for (int v = 0; v < 2; v++) {
            const int64_t column = panel * PANEL + v * LANES;
            if (op.epilogue == STORE) {
                put(static_cast<T*>(op.output) + row * op.out_features, sums[v], column, op.out_features);
            } else {
                float* to = static_cast<float*>(op.output) + row * op.out_features;
                if (op.epilogue == STORE_FLOAT)
                    put(to, sums[v], column, op.out_features);
                else if (column + LANES <= op.out_features)
                    store(to + column, load(to + column) + sums[v]);
                else
                    for (int i = 0; column + i < op.out_features; i++) to[column + i] += sums[v][i];
            }
        }
    }

    template <class To>
    static void put(To* row, vfloat sums, int64_t column, int64_t columns) {
        if (column + LANES <= columns)
            store(row + column, sums);
        else
            for (int i = 0; column + i < columns; i++) assign(row[column + i], sums[i]);
    }

    // Queries are turned where they stand; keys are turned on their way into their block.
    void rotate_and_store(const Operation& op, Pieces& pieces) {
        const int64_t dim = op.head_dim, width = (op.heads + 2 * op.kv_heads) * dim;
        T* keys = static_cast<T*>(op.key_cache);
        T* values = static_cast<T*>(op.value_cache);
        each_row(op, pieces, [&](int64_t token) {
            T* query = static_cast<T*>(op.output) + token * width;
            T* key = query + op.heads * dim;
            const T* value = key + op.kv_heads * dim;
            const float* cosine = batch_.cosines + token * dim / 2;
            const float* sine = batch_.sines + token * dim / 2;
            const int64_t block = batch_.slots[token] / BLOCK, offset = batch_.slots[token] % BLOCK;
            for (int64_t head = 0; head < op.heads; head++) turn(query + head * dim, dim, cosine, sine, op.query_norm, op.eps);
            for (int64_t head = 0; head < op.kv_heads; head++) {
                turn(key + head * dim, dim, cosine, sine, op.key_norm, op.eps);
                const int64_t panel = (block * op.kv_heads + head) * BLOCK * dim;
                for (int64_t d = 0; d < dim; d += STEP<T>)
                    memcpy(keys + panel + d * BLOCK + offset * STEP<T>, key + head * dim + d, STEP<T> * sizeof(T));
                T* to = values + panel + offset / STEP<T> * dim * STEP<T> + offset % STEP<T>;
                for (int64_t d = 0; d < dim; d++) to[d * STEP<T>] = value[head * dim + d];
            }
        });
    }

    static void turn(T* head, int64_t dim, const float* cosine, const float* sine, const float* norm, float eps) {
        if (norm) normalize(head, head, norm, dim, eps);
        const int64_t half = dim / 2;
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            vfloat low = load(head + i), high = load(head + half + i);
            vfloat c = load(cosine + i), s = load(sine + i);
            store(head + i, low * c - high * s);
            store(head + half + i, high * c + low * s);
        }
        for (; i < half; i++) {
            float low = to_float(head[i]), high = to_float(head[half + i]);
            assign(head[i], low * cosine[i] - high * sine[i]);
            assign(head[half + i], high * cosine[i] + low * sine[i]);
        }
    }

    // Tiles are rows of (token, head of the group), up to MAX_ROWS of them, that share a request and a KV head.
    void attention(const Operation& op, Pieces& pieces, AttentionScratch<T>& scratch) {
        const int64_t group = op.heads / op.kv_heads, width = (op.heads + 2 * op.kv_heads) * op.head_dim;
        const int64_t tile_count = tile_start_.back();
        const T* queries = static_cast<const T*>(op.input);
        const auto tile_of = [&](int64_t item) {
            // The last ones see most keys: they are begun first.
            const int64_t index = tile_count - 1 - item / op.kv_heads;
            const int64_t request =
                std::upper_bound(tile_start_.begin(), tile_start_.end(), index) - tile_start_.begin() - 1;
            const int64_t start = batch_.query_start[request], tokens = batch_.query_start[request + 1] - start;
            const int64_t first = (index - tile_start_[request]) * MAX_ROWS;
            Tile<T> tile;
            tile.keys = static_cast<const T*>(op.key_cache);
            tile.values = static_cast<const T*>(op.value_cache);
            tile.blocks = batch_.block_tables + request * batch_.table_stride;
            tile.context = batch_.context_lens[request];
            tile.kv_heads = op.kv_heads;
            tile.kv_head = item % op.kv_heads;
            tile.head_dim = op.head_dim;
            tile.window = op.window;
            tile.scale = op.scale;
            tile.rows = int(std::min<int64_t>(MAX_ROWS, tokens * group - first));
            for (int row = 0; row < tile.rows; row++) {
                const int64_t token = (first + row) / group, head = tile.kv_head * group + (first + row) % group;
                tile.query[row] = queries + (start + token) * width + head * op.head_dim;
                tile.out[row] = static_cast<T*>(op.output) + ((start + token) * op.heads + head) * op.head_dim;
                tile.position[row] = tile.context - tokens + token;
            }
            return tile;
        };
        const int64_t count = tile_count * op.kv_heads;
        // Heads of one block lie side by side.
        pieces.run(count, threads_, {1, op.kv_heads}, [&](int64_t first, int64_t last, int64_t next) {
            for (int64_t item = first; item < last; item++) {
                const int64_t after = item + 1 < last ? item + 1 : next;
                const Tile<T> tile = tile_of(item);
                dispatch<MAX_ROWS>(tile, after < count ? tile_of(after) : tile, scratch);
            }
        });
    }

    template <int ROWS>
    static void dispatch(const Tile<T>& tile, const Tile<T>& following, AttentionScratch<T>& scratch) {
        if constexpr (ROWS > 0) {
            if (tile.rows < ROWS) return dispatch<ROWS - 1>(tile, following, scratch);
            attend<ROWS>(tile, following, scratch);
        }
    }

    // Where each request's tiles begin; all layers have the same heads.
    void cut_into_tiles(int64_t group) {
        tile_start_.assign(1, 0);
        for (int64_t request = 0; request < batch_.requests; request++) {
            const int64_t rows = (batch_.query_start[request + 1] - batch_.query_start[request]) * group;
            tile_start_.push_back(tile_start_.back() + (rows + MAX_ROWS - 1) / MAX_ROWS);
        }
    }

    const int threads_;
    const std::vector<Operation> operations_;
    const Batch batch_;
    std::vector<int64_t> tile_start_;
    std::vector<Pieces> pieces_;  // one for each operation
};

}  // namespace manta

#define MANTA_API extern "C" __attribute__((visibility("default")))

namespace {
template <class T>
void run(void* pool, const manta::Operation* operations, int64_t count, const manta::Batch* batch) {
    auto& threads = *static_cast<manta::Pool*>(pool);
    threads.run(std::make_shared<manta::Step<T>>(threads.threads(), operations, count, *batch));
}
}  // namespace

// Null where the system does not give so many threads.
MANTA_API void* manta_pool_create(int threads) {
    auto pool = std::make_unique<manta::Pool>(threads);
    return pool->start() ? pool.release() : nullptr;
}
MANTA_API void manta_pool_destroy(void* pool) { delete static_cast<manta::Pool*>(pool); }

// The sizes of the structures, by which the binding sees that it describes them as they are.
MANTA_API int64_t manta_operation_bytes() { return sizeof(manta::Operation); }
MANTA_API int64_t manta_batch_bytes() { return sizeof(manta::Batch); }

MANTA_API void manta_run_float32(void* pool, const manta::Operation* operations, int64_t count, const manta::Batch* batch) {
    run<float>(pool, operations, count, batch);
}
MANTA_API void manta_run_bfloat16(void* pool, const manta::Operation* operations, int64_t count, const manta::Batch* batch) {
    run<manta::bf16>(pool, operations, count, batch);
}
