// Replacement for a header that Debian's libgloo-dev lacks, although Gloo's TCP headers include it. The
// compiler searches this folder last, so it prefers the header of a complete Gloo. The classes must have the
// same layout as in Gloo, because code of Gloo's library creates and destroys their objects.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class WeakNonOwningPtr;

// A pointer that keeps its object alive. It is null if the object was already destroyed.
template <typename T>
class NonOwningPtr final {
 public:
  NonOwningPtr() = default;
  explicit NonOwningPtr(const WeakNonOwningPtr<T>& weak) : ptr_(weak.ptr_.lock()) {}

  T* operator->() const noexcept { return ptr_.get(); }
  explicit operator bool() const noexcept { return ptr_ != nullptr; }

 private:
  std::shared_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr final {
 private:
  friend class WeakNonOwningPtr<T>;
  std::shared_ptr<T> ptr_;
};

template <typename T>
class WeakNonOwningPtr final {
 public:
  WeakNonOwningPtr() = default;
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>& shared) : ptr_(shared.ptr_) {}

 private:
  friend class NonOwningPtr<T>;
  std::weak_ptr<T> ptr_;
};

}  // namespace gloo
