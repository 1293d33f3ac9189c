// Replacement for a file that Debian's libgloo-dev lacks and Gloo's TCP headers include. Its folder is
// searched last, after a complete Gloo. The classes have the same layout as in Gloo, whose library creates
// and destroys the objects that share themselves.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class WeakNonOwningPtr;

// Keeps an object alive; null if the object was already destroyed.
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
