// Choosing tokens from logits, and their log-probabilities. Every row is computed by itself and in one order.
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "graft.h"
#include "parallel.h"
#include "simd.h"

namespace graft {
namespace {

typedef double DoubleVec __attribute__((vector_size(kLanes * 8)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// What an element of a row costs in multiplications of a product.
constexpr int64_t kSamplingWork = 8;

// How one row's token is chosen, as the caller lays it out.
struct Draw {
    uint64_t seed, answer, position;
    double temperature;  // 0 takes the largest logit
    double top_p, min_p;
    int64_t top_k;  // 0 for all
};

// The first of 4 numbers that Philox 4x64 of 10 rounds gives for a counter, in [0, 1).
// Source: Salmon et al. 2011, as numpy.random.Philox counts.
double uniform(const Draw &how) {
    constexpr uint64_t kFactors[2] = {0xD2E7470EE14C6C93u, 0xCA5A826395121157u};
    constexpr uint64_t kSteps[2] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu};
    uint64_t counter[4] = {how.position + 1, 0, 0, 0}, key[2] = {how.seed, how.answer};
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = (unsigned __int128)kFactors[0] * counter[0];
        unsigned __int128 second = (unsigned __int128)kFactors[1] * counter[2];
        counter[0] = uint64_t(second >> 64) ^ counter[1] ^ key[0];
        counter[1] = uint64_t(second);
        counter[2] = uint64_t(first >> 64) ^ counter[3] ^ key[1];
        counter[3] = uint64_t(first);
        key[0] += kSteps[0];
        key[1] += kSteps[1];
    }
    return double(counter[0] >> 11) * 0x1p-53;
}

double sum(DoubleVec value) {
    double total = 0.0;
    for (int lane = 0; lane < kLanes; lane++) total += value[lane];
    return total;
}

// Order of logits as unsigned integers; NaN is the least, and zeros are alike.
uint32_t sortable(float value) {
    if (value != value) return 0;
    value += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A row's logits, and the largest of each block of them.
template <typename T> class Row {
  public:
    static constexpr int64_t kBlock = 64;

    Row(const T *logits, int64_t count) : logits_(logits), count_(count), maxima_(size_t((count + kBlock - 1) / kBlock)) {
        for (size_t block = 0; block < maxima_.size(); block++) {
            Vec most = splat(-kInfinity);
            // NaN is no larger than anything.
            each(int64_t(block) * kBlock, int64_t(block + 1) * kBlock,
                 [&](int64_t, Vec value) { most = select(value > most, value, most); });
            maxima_[block] = graft::largest(most);
            largest_ = std::max(largest_, maxima_[block]);
        }
    }

    int64_t count() const { return count_; }
    float largest() const { return largest_; }
    float at(int64_t place) const { return widen(logits_[place]); }

    // The first of the largest.
    int64_t first_of_largest() const {
        int64_t place = 0;
        while (maxima_[size_t(place / kBlock)] != largest_) place += kBlock;
        while (at(place) != largest_) place++;
        return place;
    }

    // body(place, logits) for each vector of [start, stop); lanes beyond the row are -inf.
    template <typename Body> void each(int64_t start, int64_t stop, const Body &body) const {
        int64_t whole = std::min(stop, count_ / kLanes * kLanes), place = start;
        for (; place < whole; place += kLanes) body(place, load(logits_ + place));
        if (place >= std::min(stop, count_)) return;
        int some = int(count_ - place);
        Vec value = load_some(logits_ + place, some);
        for (int lane = some; lane < kLanes; lane++) value[lane] = -kInfinity;
        body(place, value);
    }
    template <typename Body> void each(const Body &body) const { each(0, count_, body); }
    // Of blocks with takes(largest) only.
    template <typename Takes, typename Body> void each_where(const Takes &takes, const Body &body) const {
        for (size_t block = 0; block < maxima_.size(); block++)
            if (takes(maxima_[block])) each(int64_t(block) * kBlock, int64_t(block + 1) * kBlock, body);
    }

    // Keys stand in the order of tokens: the larger key is the better token, of equals the first.
    uint64_t key(int64_t place) const { return uint64_t(sortable(at(place))) << 32 | uint32_t(~uint32_t(place)); }
    static uint32_t place(uint64_t key) { return ~uint32_t(key); }

    // Places of the `wanted` largest, best first and of equals the first first.
    std::vector<uint32_t> best(int64_t wanted) const {
        std::vector<uint64_t> keys = at_least(bound(wanted));
        if (int64_t(keys.size()) < wanted) keys = all();
        if (int64_t(keys.size()) > wanted) {
            std::nth_element(keys.begin(), keys.begin() + wanted, keys.end(), std::greater<uint64_t>());
            keys.resize(size_t(wanted));
        }
        std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
        std::vector<uint32_t> places(keys.size());
        for (size_t i = 0; i < keys.size(); i++) places[i] = place(keys[i]);
        return places;
    }

  private:
    // A logit that at least `wanted` reach: as many blocks have one.
    float bound(int64_t wanted) const {
        if (wanted >= int64_t(maxima_.size())) return -kInfinity;
        std::vector<float> maxima = maxima_;
        std::nth_element(maxima.begin(), maxima.begin() + (wanted - 1), maxima.end(), std::greater<float>());
        return maxima[size_t(wanted - 1)];
    }

    std::vector<uint64_t> at_least(float least) const {
        std::vector<uint64_t> keys;
        for (size_t block = 0; block < maxima_.size(); block++) {
            if (!(maxima_[block] >= least)) continue;
            int64_t start = int64_t(block) * kBlock;
            for (int64_t place = start; place < std::min(start + kBlock, count_); place++)
                if (at(place) >= least) keys.push_back(key(place));
        }
        return keys;
    }

    std::vector<uint64_t> all() const {
        std::vector<uint64_t> keys(static_cast<size_t>(count_));
        for (int64_t place = 0; place < count_; place++) keys[size_t(place)] = key(place);
        return keys;
    }

    const T *logits_;
    int64_t count_;
    std::vector<float> maxima_;
    float largest_ = -kInfinity;
};

// Of logits, e^-distance with distance (largest - logit) / temperature: their probabilities but for a factor.
class Weighing {
  public:
    // From here on there is no weight.
    static constexpr float kFar = 87.0f;

    Weighing(float largest, float temperature) : largest_(largest), scale_(1.0f / temperature) {}

    // From 0 to kFar, which NaN has as well.
    Vec distances(Vec logits) const {
        Vec distances = min((largest_ - logits) * scale_, splat(kFar));
        return select(logits == splat(largest_), splat(0.0f), distances);
    }
    static Vec at(Vec distances) { return select(distances < splat(kFar), exp(-distances), splat(0.0f)); }
    Vec operator()(Vec logits) const { return at(distances(logits)); }
    float operator()(float logit) const { return (*this)(splat(logit))[0]; }

  private:
    float largest_, scale_;
};

// The first place at which the weights, added up, exceed a share of their total.
template <typename T> int64_t draw_from_all(const Row<T> &row, const Weighing &weigh, double share) {
    constexpr int64_t kPiece = 16 * Row<T>::kBlock;
    std::vector<DoubleVec> pieces(size_t((row.count() + kPiece - 1) / kPiece), DoubleVec{});
    row.each([&](int64_t place, Vec logits) {
        pieces[size_t(place / kPiece)] += __builtin_convertvector(weigh(logits), DoubleVec);
    });
    double total = 0.0;
    for (const DoubleVec &piece : pieces) total += sum(piece);
    double threshold = share * total, before = 0.0;
    size_t piece = 0;
    for (double own = sum(pieces[0]); piece + 1 < pieces.size() && before + own <= threshold; own = sum(pieces[piece])) {
        before += own;
        piece++;
    }
    // Where rounding leaves nothing that exceeds it, the last that has a weight.
    int64_t chosen = row.first_of_largest();
    bool is_found = false;
    row.each(int64_t(piece) * kPiece, int64_t(piece + 1) * kPiece, [&](int64_t place, Vec logits) {
        if (is_found) return;
        Vec weights = weigh(logits);
        for (int lane = 0; lane < kLanes && !is_found; lane++) {
            if (weights[lane] > 0.0f) chosen = place + lane;
            before += double(weights[lane]);
            is_found = before > threshold;
        }
    });
    return chosen;
}

// A row's tokens, best first, as far as they are asked for. Weights are added up in buckets of tokens that are about as
// far from the best, and a bucket is sorted once what is looked for is known to be in it: time is linear in the row.
template <typename T> class Ranking {
  public:
    // A token, and the weight of all up to it.
    struct Found {
        int64_t token;
        double weight;
    };

    // least: of the weights that count.
    Ranking(const Row<T> &row, const Weighing &weigh, double least)
        : row_(row), weigh_(weigh), least_(float(least)), buckets_(kBuckets) {
        DoubleVec lanes{};
        row.each_where([&](float largest) { return weigh_(largest) > 0.0f; }, [&](int64_t, Vec logits) {
            Vec distances = weigh_.distances(logits), weights = Weighing::at(distances);
            lanes += __builtin_convertvector(weights, DoubleVec);
            add(bucket_of(distances), __builtin_convertvector(counted(weights), DoubleVec));
        });
        total_ = sum(lanes);
    }

    // Of all weights, those that do not count too.
    double total() const { return total_; }

    // The first at which is_reached(weight of all up to it), or the last that counts.
    template <typename Reached> Found find(const Reached &is_reached) const {
        Found found{-1, 0.0};
        size_t last = buckets_.size();
        while (buckets_[last - 1] == 0.0) last--;
        size_t bucket = 0;
        while (bucket + 1 < last && !(buckets_[bucket] > 0.0 && is_reached(found.weight + buckets_[bucket])))
            found.weight += buckets_[bucket++];
        for (uint64_t key : keys_of(uint32_t(bucket))) {
            found.token = Row<T>::place(key);
            found.weight += double(weigh_(row_.at(found.token)));
            if (is_reached(found.weight)) break;
        }
        return found;
    }

  private:
    // The first bits of a distance, in whose order distances stand.
    static constexpr int kShift = 15;
    static constexpr size_t kBuckets = (0x42ae0000u >> kShift) + 1;  // of kFar
    static UintVec bucket_of(Vec distances) { return (UintVec)distances >> kShift; }

    Vec counted(Vec weights) const { return select(weights >= splat(least_), weights, splat(0.0f)); }

    void add(UintVec buckets, DoubleVec weights) {
        for (int lane = 0; lane < kLanes; lane++) buckets_[buckets[lane]] += weights[lane];
    }

    // Of the tokens of a bucket that count, best first.
    std::vector<uint64_t> keys_of(uint32_t bucket) const {
        std::vector<uint64_t> keys;
        row_.each_where([&](float largest) { return bucket_of(weigh_.distances(splat(largest)))[0] <= bucket; },
                        [&](int64_t place, Vec logits) {
            Vec distances = weigh_.distances(logits);
            IntVec is_there = (IntVec)(bucket_of(distances) == bucket);
            if (!any(is_there)) return;
            is_there &= Weighing::at(distances) >= splat(least_);
            for (int lane = 0; lane < kLanes; lane++)
                if (is_there[lane]) keys.push_back(row_.key(place + lane));
        });
        std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
        return keys;
    }

    const Row<T> &row_;
    const Weighing &weigh_;
    float least_;
    double total_;
    std::vector<double> buckets_;
};

// The same of the best, in their order, that top_p and min_p leave.
template <typename T>
int64_t draw_from_best(const Row<T> &row, const Weighing &weigh, const Draw &how, double share) {
    Ranking<T> ranking(row, weigh, how.min_p);
    double most = how.top_p < 1.0 ? how.top_p * ranking.total() : std::numeric_limits<double>::infinity();
    auto kept = ranking.find([=](double weight) { return weight >= most; });
    double threshold = share * kept.weight;
    if (threshold >= kept.weight) return kept.token;
    return ranking.find([=](double weight) { return weight > threshold; }).token;
}

// The same where there is top_k.
template <typename T>
int64_t draw_from_top_k(const Row<T> &row, const Weighing &weigh, const Draw &how, double share) {
    std::vector<uint32_t> places = row.best(std::min(how.top_k, row.count()));
    std::vector<float> weights(places.size());
    double total = 0.0;
    for (size_t i = 0; i < places.size(); i++) {
        weights[i] = weigh(row.at(places[i]));
        total += double(weights[i]);
    }
    double kept = 0.0;
    size_t count = 0;
    for (; count < places.size(); count++) {
        double weight = double(weights[count]);
        if (weight <= 0.0 || weight < how.min_p || (how.top_p < 1.0 && kept >= how.top_p * total)) break;
        kept += weight;
    }
    double threshold = share * kept, before = 0.0;
    for (size_t i = 0; i < count; i++) {
        before += double(weights[i]);
        if (before > threshold) return places[i];
    }
    return places[count - 1];
}

template <typename T> int64_t draw(const T *logits, int64_t count, const Draw &how) {
    Row<T> row(logits, count);
    if (row.at(0) != row.at(0) || row.largest() == -kInfinity) return -1;
    if (how.temperature == 0.0 || how.top_k == 1) return row.first_of_largest();
    // What float32 cannot tell from 0 or infinity would make NaN of the best token or of those that are ruled out.
    Weighing weigh(row.largest(), float(std::clamp(how.temperature, double(FLT_MIN), double(FLT_MAX))));
    double share = uniform(how);
    if (how.top_k > 0) return draw_from_top_k(row, weigh, how, share);
    return how.top_p < 1.0 || how.min_p > 0.0 ? draw_from_best(row, weigh, how, share)
                                              : draw_from_all(row, weigh, share);
}

template <typename T>
void draw(int64_t *tokens, const T *logits, const Draw *draws, int64_t rows, int64_t columns, int64_t stride,
          int threads) {
    parallel(rows, threads_for(rows * columns * kSamplingWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t row = start; row < stop; row++) tokens[row] = draw(logits + row * stride, columns, draws[row]);
    });
}

// Where the results of `rate` go. best: so many for each row.
struct Rating {
    float *logprobs;
    int64_t *ranks;
    int64_t *best_ids;
    float *best_logprobs;
    int64_t best;
};

template <typename T>
void rate(const Rating &to, const T *logits, int64_t token, int64_t index, int64_t count) {
    Row<T> row(logits, count);
    float of_token = row.at(token);
    DoubleVec lanes{};
    IntVec larger{};
    row.each([&](int64_t, Vec values) {
        lanes += __builtin_convertvector(exp(values - row.largest()), DoubleVec);
        larger -= values > splat(of_token);
    });
    double total = double(row.largest()) + std::log(sum(lanes));
    int64_t rank = 1;
    for (int lane = 0; lane < kLanes; lane++) rank += larger[lane];
    to.logprobs[index] = float(double(of_token) - total);
    to.ranks[index] = rank;
    if (to.best == 0) return;
    std::vector<uint32_t> places = row.best(to.best);
    for (int64_t i = 0; i < to.best; i++) {
        to.best_ids[index * to.best + i] = places[size_t(i)];
        to.best_logprobs[index * to.best + i] = float(double(row.at(places[size_t(i)])) - total);
    }
}

template <typename T>
void rate(Rating to, const T *logits, const int64_t *tokens, int64_t rows, int64_t columns, int64_t stride,
          int threads) {
    parallel(rows, threads_for(rows * columns * kSamplingWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t row = start; row < stop; row++) rate(to, logits + row * stride, tokens[row], row, columns);
    });
}

}  // namespace
}  // namespace graft

using namespace graft;

// tokens: [rows], -1 where the first logit is NaN or no logit is above -inf. logits: [rows, columns]. draws: [rows].
GRAFT_API void graft_draw_tokens(int64_t *tokens, const void *logits, const void *draws, int dtype, int64_t rows,
                                 int64_t columns, int64_t stride, int threads) {
    if (dtype == 0)
        draw(tokens, (const float *)logits, (const Draw *)draws, rows, columns, stride, threads);
    else
        draw(tokens, (const bf16 *)logits, (const Draw *)draws, rows, columns, stride, threads);
}

// logprobs, ranks: [rows], of `tokens`. best_ids, best_logprobs: [rows, best], at most `columns` of them.
GRAFT_API void graft_token_logprobs(float *logprobs, int64_t *ranks, int64_t *best_ids, float *best_logprobs,
                                    const void *logits, const int64_t *tokens, int dtype, int64_t rows,
                                    int64_t columns, int64_t stride, int64_t best, int threads) {
    Rating to{logprobs, ranks, best_ids, best_logprobs, best};
    if (dtype == 0)
        rate(to, (const float *)logits, tokens, rows, columns, stride, threads);
    else
        rate(to, (const bf16 *)logits, tokens, rows, columns, stride, threads);
}
