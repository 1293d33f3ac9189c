// Prefix reductions: rank r gets the reduction of the arrays of ranks 0 to r (scan) or 0 to r-1 (exscan).

#include "../reduce/half.h"
#include "../reduce/reduce.h"
#include "collectives.h"

namespace fl {
namespace {

// Maximum number of chunks that are in transit to, or from, one rank.
constexpr size_t kDepth = 2;

template <typename T>
void widen(float* into, const void* from, size_t count) {
  const T* values = static_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) into[i] = values[i].widen();
}

template <typename T>
void narrow(void* into, const float* from, size_t count) {
  T* values = static_cast<T*>(into);
  for (size_t i = 0; i < count; ++i) values[i] = T::narrow(from[i]);
}

// For large arrays: each rank receives a chunk from the previous rank, reduces it with its own chunk, and
// sends the result to the next rank. Each rank works one chunk behind the previous rank.
class Chain {
 public:
  Chain(Mesh& mesh, Call& call, char* data)
      : call_(call),
        signature_(call.signature),
        rank_(mesh.rank),
        size_(mesh.size),
        terms_(rank_ + (signature_.verb == FL_SCAN ? 1 : 0)),
        data_(data),
        is_narrow_(is_narrow(signature_.dtype)),
        dtype_(is_narrow_ ? static_cast<int>(FL_FLOAT32) : signature_.dtype),
        op_(signature_.op == FL_AVG ? static_cast<int>(FL_SUM) : signature_.op),
        factor_(signature_.op == FL_AVG ? signature_.scale / terms_ : signature_.scale),
        item_(is_narrow_ ? sizeof(float) : signature_.itemsize),
        piece_(kChunkBytes / item_),
        memory_(new char[2 * kDepth * kChunkBytes]),
        arriving_(mesh.buffer(memory_.get(), kDepth * kChunkBytes)),
        leaving_(mesh.buffer(memory_.get() + kDepth * kChunkBytes, kDepth * kChunkBytes)),
        wide_(is_narrow_ ? new float[piece_] : nullptr) {}

  void run() {
    const size_t pieces = (static_cast<size_t>(signature_.count) + piece_ - 1) / piece_;
    if (rank_ > 0) receive(0);
    for (size_t c = 0; c < pieces; ++c) {
      if (rank_ > 0 && c + 1 < pieces) receive(c + 1);
      combine(c);
    }
    for (size_t c = pieces - std::min(pieces, kDepth); has_next() && c < pieces; ++c) {
      call_.waiter.sent(*leaving_, rank_ + 1);
    }
  }

 private:
  bool has_next() const { return rank_ + 1 < size_; }
  size_t count(size_t c) const { return std::min(piece_, signature_.count - c * piece_); }
  char* position(size_t c) const { return data_ + c * piece_ * signature_.itemsize; }

  // Return the offset of chunk `c` in arriving_ and leaving_.
  static size_t slot(size_t c) { return c % kDepth * kChunkBytes; }

  void receive(size_t c) { arriving_->recv(rank_ - 1, kPartSlot, slot(c), count(c) * item_); }

  void reduce(double scale, void* into, const void* first, const void* second, size_t n) {
    const void* const from[] = {first, second};
    fl::reduce(dtype_, op_, scale, into, from, second == nullptr ? 1 : 2, n);
  }

  void combine(size_t c) {
    const size_t n = count(c);
    const void* before = nullptr;
    if (rank_ > 0) {
      call_.waiter.received(*arriving_, rank_ - 1);
      before = static_cast<char*>(arriving_->ptr) + slot(c);
    }
    const void* own_data = position(c);
    if (is_narrow_) own_data = widened(own_data, n);
    const void* all = own_data;  // reduction of the chunks of ranks 0 to rank_
    if (has_next()) {
      if (c >= kDepth) call_.waiter.sent(*leaving_, rank_ + 1);
      void* next = static_cast<char*>(leaving_->ptr) + slot(c);
      rank_ > 0 ? reduce(1.0, next, before, own_data, n)
                : static_cast<void>(std::memcpy(next, own_data, n * item_));
      leaving_->send(rank_ + 1, kPartSlot, slot(c), n * item_);
      all = next;
    } else if (terms_ == size_ && rank_ > 0) {
      return finish(c, before, own_data);
    }
    if (terms_ > 0) finish(c, terms_ > rank_ ? all : before, nullptr);
  }

  const void* widened(const void* own_data, size_t n) {
    signature_.dtype == FL_FLOAT16 ? widen<Float16>(wide_.get(), own_data, n)
                            : widen<Bfloat16>(wide_.get(), own_data, n);
    return wide_.get();
  }

  // Store this rank's result: the reduction of `first` and, if it is not null, `second`.
  void finish(size_t c, const void* first, const void* second) {
    const size_t n = count(c);
    if (!is_narrow_) return reduce(factor_, position(c), first, second, n);
    reduce(factor_, wide_.get(), first, second, n);
    signature_.dtype == FL_FLOAT16 ? narrow<Float16>(position(c), wide_.get(), n)
                            : narrow<Bfloat16>(position(c), wide_.get(), n);
  }

  Call& call_;
  const fl_signature& signature_;
  const int rank_, size_;
  const int terms_;  // the result is the reduction of ranks 0 to terms_ - 1
  char* const data_;
  const bool is_narrow_;  // then partial results are sent as float32, and only the result is rounded
  const int dtype_, op_;
  const double factor_;
  const size_t item_, piece_;  // bytes per sent element, elements per chunk
  const std::unique_ptr<char[]> memory_;
  const Buffer arriving_, leaving_;  // kDepth chunks each
  const std::unique_ptr<float[]> wide_;
};

}  // namespace

// If the array is small, every rank receives the arrays of all previous ranks.
void Collectives::scan(Call& call, void* data) {
  const bool small = call.bytes() * (size_ - 1) <= kInlineBytes;
  Parts give(size_);
  for (int r = rank_ + 1; r < size_ && small; ++r) give[r] = {0, call.bytes()};
  exchange_calls(call, data, give);
  if (small) scan_inline(call, data);
  if (!small) Chain(mesh_, call, static_cast<char*>(data)).run();
}

void Collectives::scan_inline(const Call& call, void* data) {
  const fl_signature& signature = call.signature;
  const int terms = rank_ + (signature.verb == FL_SCAN ? 1 : 0);
  Parts take(size_);
  for (int r = 0; r < terms; ++r) take[r].bytes = call.bytes();
  fetch(take);
  std::vector<const void*> from;
  for (int r = 0; r < terms; ++r) from.push_back(r == rank_ ? data : payload(r));
  if (terms > 0) fl::reduce(signature.dtype, signature.op, signature.scale, data, from.data(), terms,
                            signature.count);
}

}  // namespace fl
