// Debian's libgloo-dev lacks this file, which Gloo's headers of TCP include: looked for last, after a
// complete Gloo's. Of these classes only the size counts here, which is that of their one pointer.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr final {
 private:
  std::shared_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr;

template <typename T>
class WeakNonOwningPtr final {
 public:
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>&);

 private:
  std::weak_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr final {
 private:
  std::shared_ptr<T> ptr_;
};

}  // namespace gloo
