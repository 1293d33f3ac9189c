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
  void append(T& item) {
    if (size_ >= kLoad * tails_.size()) grow();
    put(item);
    ++size_;
  }

  // The oldest with that key; null: there is none.
  T* first(uint64_t key) const {
    T* const tail = size_ == 0 ? nullptr : tails_[place_of(key)];
    if (tail == nullptr) return nullptr;
    for (T* item = tail->next;; item = item->next) {
      if (item->key() == key) return item;
      if (item == tail) return nullptr;
    }
  }

  void remove(T& item) {
    T*& tail = tails_[place_of(item.key())];
    T* before = tail;
    while (before->next != &item) before = before->next;
    before->next = item.next;
    if (tail == &item) tail = before == &item ? nullptr : before;
    item.next = nullptr;
    --size_;
  }

  // Take all of them out.
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
  static constexpr size_t kLoad = 2;  // items for each bucket, at most

  size_t place_of(uint64_t key) const {
    return (key * 0x9e3779b97f4a7c15u >> 32) & (tails_.size() - 1);
  }

  void put(T& item) {
    T*& tail = tails_[place_of(item.key())];
    item.next = tail == nullptr ? &item : std::exchange(tail->next, &item);
    tail = &item;
  }

  void grow() {
    const auto before = std::exchange(tails_, std::vector<T*>(tails_.empty() ? 8 : 2 * tails_.size()));
    for (T* tail : before) {
      for (T* item = opened(tail); item != nullptr;) put(*std::exchange(item, take_next(*item)));
    }
  }

  // The first of a ring, whose last has no next any more.
  static T* opened(T* tail) { return tail == nullptr ? nullptr : std::exchange(tail->next, nullptr); }
  static T* take_next(T& item) { return std::exchange(item.next, nullptr); }

  std::vector<T*> tails_;  // of each bucket, a ring, the last; null: it is empty. A power of two
  size_t size_ = 0;
};

}  // namespace fl
