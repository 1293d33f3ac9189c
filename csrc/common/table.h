// A hash table of queues. Items with equal keys keep their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fl {

// The table uses `uint64_t key() const` and the link `T* next` of items. A bucket is a queue of items, whose
// keys may differ. Operations take constant time if items with equal keys are removed in order.
template <typename T>
class Table {
 public:
  void append(T& item) {
    if (size_ >= kLoad * tails_.size()) grow();
    put(item);
    ++size_;
  }

  // Return the oldest item with this key, or null.
  T* first(uint64_t key) const {
    T* const tail = size_ == 0 ? nullptr : tails_[bucket_of(key)];
    if (tail == nullptr) return nullptr;
    for (T* item = tail->next;; item = item->next) {
      if (item->key() == key) return item;
      if (item == tail) return nullptr;
    }
  }

  void remove(T& item) {
    T*& tail = tails_[bucket_of(item.key())];
    T* before = tail;
    while (before->next != &item) before = before->next;
    before->next = item.next;
    if (tail == &item) tail = before == &item ? nullptr : before;
    item.next = nullptr;
    --size_;
  }

  // Remove all items and call `visit` for each item.
  template <typename Visit>
  void clear(Visit visit) {
    size_ = 0;
    for (T* tail : std::exchange(tails_, {})) {
      for (T* item = opened(tail); item != nullptr;) visit(*std::exchange(item, take_next(*item)));
    }
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (T* tail : tails_) {
      if (tail == nullptr) continue;
      for (T* item = tail->next;; item = item->next) {
        visit(*item);
        if (item == tail) break;
      }
    }
  }

 private:
  static constexpr size_t kLoad = 2;  // maximum number of items per bucket

  size_t bucket_of(uint64_t key) const { return (key * 0x9e3779b97f4a7c15u >> 32) & (tails_.size() - 1); }

  void put(T& item) {
    T*& tail = tails_[bucket_of(item.key())];
    item.next = tail == nullptr ? &item : std::exchange(tail->next, &item);
    tail = &item;
  }

  void grow() {
    const auto before = std::exchange(tails_, std::vector<T*>(tails_.empty() ? 8 : 2 * tails_.size()));
    for (T* tail : before) {
      for (T* item = opened(tail); item != nullptr;) put(*std::exchange(item, take_next(*item)));
    }
  }

  // Turn a ring into a list: return its first item and clear the last item's link.
  static T* opened(T* tail) { return tail == nullptr ? nullptr : std::exchange(tail->next, nullptr); }
  static T* take_next(T& item) { return std::exchange(item.next, nullptr); }

  std::vector<T*> tails_;  // by bucket: last item of its ring, or null. The size is a power of two
  size_t size_ = 0;
};

}  // namespace fl
