// Access to the memory of other ranks.
#include "collectives.h"

#include "../common/copying.h"

namespace fl {

Collectives::Collectives(Segment& segment, Peers& peers, Remote& remote, int rank, int size)
    : segment_(segment), peers_(peers), remote_(remote), watch_(peers, {}, 0, nullptr), rank_(rank),
      size_(size), from_(size), choice_(FL_VERBS) {}

// Large arrays --------------------------------------------------------------------------------

// Choose the copy path from the costs that all ranks have announced with their calls. `bytes` is equal on all
// ranks. Direct reads are allowed if `may_read`.
CopyPath Collectives::choose_in(uint32_t number, const fl_signature& signature, size_t bytes, bool may_read) {
  Costs slowest{};
  bool all_can_read = may_read && bytes >= kReadBytes;
  for (int r = 0; r < size_; ++r) {
    const Call& call = call_of(r, number);
    all_can_read = all_can_read && (call.kind & kCanRead) != 0;
    if ((call.kind & kIsLarge) != 0) slowest.raise(call.large.costs);
  }
  const int key = signature.verb == FL_ALL_REDUCE && all_in_one_region() ? 0 : signature.verb;
  trial_ = choice_.begin(key, bytes, all_can_read ? kPaths : kDirectly, slowest);
  return trial_.path;
}

// Read `bytes` bytes, from `begin` on, of the array that rank r passed to this call.
void Collectives::read(int r, size_t begin, void* into, size_t bytes) {
  if (bytes == 0) return;
  const size_t done = remote_.read(r, call_of(r).large.address + begin, into, bytes);
  if (done < bytes) request_read(r, begin + done, static_cast<char*>(into) + done, bytes - done);
}

// Let rank r copy its data to a slot of this rank, which cannot read the memory of rank r. Rank r does this
// while it waits in wait_and(). The slots are free, because all ranks are in this call.
void Collectives::request_read(int r, size_t begin, char* into, size_t bytes) {
  ReadRequest& request = segment_.block(rank_).request;
  for (size_t done = 0; done < bytes;) {
    const size_t size = std::min(segment_.chunk_bytes(), bytes - done);
    request.owner = r;
    request.begin = begin + done;
    request.bytes = size;
    const uint32_t number = request.requested.value() + 1;
    request.requested.set(number);
    watch_.wait_and(request.served, number, r, [this] { return serve(); });
    copy(into + done, segment_.slot(rank_, 0), size);
    done += size;
  }
}

// Copy the data that other ranks have requested. Return true if there was a request.
bool Collectives::serve() {
  bool served = false;
  for (int r = 0; r < size_; ++r) {
    ReadRequest& request = segment_.block(r).request;
    const uint32_t number = request.requested.value();
    if (r == rank_ || number == request.served.value() || request.owner != rank_) continue;
    const char* data = reinterpret_cast<const char*>(call_of(rank_).large.address);
    stream_copy(segment_.slot(r, 0), data + request.begin, request.bytes);
    request.served.raise(number);
    served = true;
  }
  return served;
}

// Wait until the other ranks have read this rank's data, if it has any.
void Collectives::end_reading(bool has_data) {
  pass_chunks(1);
  for (int r = 0; has_data && r < size_; ++r) {
    if (!reads(r)) continue;
    watch_.wait_and(segment_.block(r).drained, chunks_, r, [this] { return serve(); });
  }
}

// Arrays in shared memory ---------------------------------------------------------------------

void* Collectives::add_region(std::shared_ptr<Mapping> mapping, size_t stride) {
  char* own_array = mapping->data() + rank_ * stride;
  regions_.push_back({std::move(mapping), stride});
  return own_array;
}

void Collectives::drop_region(const void* array) {
  const uint64_t own_location = location_of(array);
  if (own_location != 0) regions_[(own_location >> 44) - 1].mapping = nullptr;
}

// Return region number << 44 | offset in this rank's array, or 0 outside regions. Numbers begin at 1.
uint64_t Collectives::location_of(const void* data) const {
  const char* at = static_cast<const char*>(data);
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i].mapping == nullptr) continue;
    const char* own_array = regions_[i].mapping->data() + rank_ * regions_[i].stride;
    if (at >= own_array && at < own_array + regions_[i].stride) {
      return static_cast<uint64_t>(i + 1) << 44 | static_cast<uint64_t>(at - own_array);
    }
  }
  return 0;
}

bool Collectives::all_in_one_region() const {
  const uint64_t own_location = call_of(rank_).location;
  if (own_location == 0) return false;
  for (int r = 0; r < size_; ++r) {
    if (call_of(r).location != own_location) return false;
  }
  return true;
}

char* Collectives::in_region(int rank) const {
  const uint64_t own_location = call_of(rank_).location;
  const Region& region = regions_[(own_location >> 44) - 1];
  return region.mapping->data() + rank * region.stride + (own_location & ((uint64_t{1} << 44) - 1));
}

}  // namespace fl
