// Debian's libgloo-dev lacks this file, which Gloo's headers of TCP include: looked for last, after a
// complete Gloo's. A class with these pointers is laid out as there; one that shares itself by one is made
// and destroyed in the library.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class WeakNonOwningPtr;

// To what is not destroyed as long as this lives; null where it was.
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
