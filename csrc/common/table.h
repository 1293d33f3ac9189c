// A hash table of queues: what has one key keeps its order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fl {

// Of `T` with `uint64_t key() const` and `T* next`, the table's own. Each bucket is a queue, in which
// whatever has other keys lies between: it takes constant time as long as keys differ or are taken in order.
template <typename T>
class Table {
 public:
  size_t size() const { return size_; }

  void append(T& item) {
    if (size_ >= buckets_.size()) grow();
    put(item);
    ++size_;
  }

  // The oldest with that key; null: there is none.
  T* first(uint64_t key) const {
    if (size_ == 0) return nullptr;
    T* item = buckets_[place_of(key)].head;
    while (item != nullptr && item->key() != key) item = item->next;
    return item;
  }

  void remove(T& item) {
    Bucket& bucket = buckets_[place_of(item.key())];
    T* before = nullptr;
    for (T* at = bucket.head; at != &item; at = at->next) before = at;
    (before == nullptr ? bucket.head : before->next) = item.next;
    if (bucket.tail == &item) bucket.tail = before;
    item.next = nullptr;
    --size_;
  }

  // Take all of them out.
  template <typename Visit>
  void clear(Visit visit) {
    const auto buckets = std::exchange(buckets_, {});
    size_ = 0;
    for (const Bucket& bucket : buckets) {
      for (T* item = bucket.head; item != nullptr;) {
        T* const next = std::exchange(item->next, nullptr);
        visit(*item);
        item = next;
      }
    }
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Bucket& bucket : buckets_) {
      for (T* item = bucket.head; item != nullptr; item = item->next) visit(*item);
    }
  }

 private:
  struct Bucket {
    T* head = nullptr;
    T* tail = nullptr;
  };

  size_t place_of(uint64_t key) const {
    return (key * 0x9e3779b97f4a7c15u >> 32) & (buckets_.size() - 1);
  }

  void put(T& item) {
    Bucket& bucket = buckets_[place_of(item.key())];
    item.next = nullptr;
    (bucket.head == nullptr ? bucket.head : bucket.tail->next) = &item;
    bucket.tail = &item;
  }

  void grow() {
    const auto before = std::exchange(buckets_, std::vector<Bucket>(buckets_.empty() ? 16 : 2 * buckets_.size()));
    for (const Bucket& bucket : before) {
      for (T* item = bucket.head; item != nullptr;) {
        T* const next = item->next;
        put(*item);
        item = next;
      }
    }
  }

  std::vector<Bucket> buckets_;  // a power of two
  size_t size_ = 0;
};

}  // namespace fl
