#include "notices.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fl {
namespace {

// Notices of a peer that can be on their way at once.
constexpr size_t kPosted = 4;

// Blanks that are kept: more messages at once are rare.
constexpr size_t kSpare = 32;

// Only a small send has its payload with it.
size_t payload_of(const fl_signature& call) {
  return call.verb == FL_SEND && !is_large(call) ? bytes_of(call) : 0;
}

}  // namespace

struct Notices::Line {
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::list<NoticePtr> posted;  // in the order in which they will arrive
  std::list<NoticePtr> told;    // in the order in which they came
  bool reading = false;         // a thread waits for the next one
};

Notices::Notices(Mesh& mesh) : mesh_(mesh), lines_(mesh.size) {}

Notices::~Notices() = default;

void Notices::open() {
  for (int peer = 0; peer < mesh_.size; ++peer) {
    if (peer == mesh_.rank) continue;
    lines_[peer] = std::make_unique<Line>();
    post(*lines_[peer], peer);
  }
}

NoticePtr Notices::blank() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!blanks_.empty()) {
      NoticePtr notice = std::move(blanks_.back());
      blanks_.pop_back();
      return notice;
    }
  }
  NoticePtr notice(new Notice);
  notice->buffer = mesh_.buffer(notice.get(), offsetof(Notice, buffer));
  return notice;
}

void Notices::take_back(NoticePtr notice) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (blanks_.size() < kSpare) blanks_.push_back(std::move(notice));
}

void Notices::post(Line& line, int peer) {
  while (line.posted.size() < kPosted) {
    line.posted.push_back(blank());
    line.posted.back()->call.sequence = 0;  // until it arrives
    try {
      line.posted.back()->buffer->recv(peer, kNoticeSlot);
    } catch (const std::exception&) {
      // This peer has left already, after a message that succeeded. Who waits for another one hears
      // of it from the watch.
      continue;
    }
  }
}

void Notices::give(const Notice& notice, int peer) {
  const size_t bytes = offsetof(Notice, payload) + payload_of(notice.call);
  notice.buffer->send(peer, kNoticeSlot, 0, bytes);
}

NoticePtr Notices::receive(int peer, int verb, int32_t tag, Waiter& waiter) {
  Line& line = *lines_[peer];
  std::unique_lock<std::mutex> lock(line.mutex);
  for (;;) {
    const auto found = std::find_if(
        line.told.begin(), line.told.end(),
        [&](const NoticePtr& told) { return told->call.verb == verb && told->call.root == tag; });
    if (found != line.told.end()) {
      NoticePtr told = std::move(*found);
      line.told.erase(found);
      return told;
    }
    if (!line.reading) {
      read(line, lock, peer, waiter);
    } else if (line.changed.wait_for(lock, kTick) == std::cv_status::timeout) {
      lock.unlock();
      waiter.look_around(peer);
      lock.lock();
    }
  }
}

// Read one notice, whomever it is for. The lock is held before and after, not while waiting.
// Receives are posted before the wait, when there is time for it, not after.
void Notices::read(Line& line, std::unique_lock<std::mutex>& lock, int peer, Waiter& waiter) {
  post(line, peer);
  Notice& next = *line.posted.front();
  line.reading = true;
  lock.unlock();
  const struct Leave {
    Line& line;
    std::unique_lock<std::mutex>& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      line.reading = false;
      line.changed.notify_all();
    }
  } leave{line, lock};
  waiter.received(*next.buffer, peer);
  lock.lock();
  line.told.splice(line.told.end(), line.posted, line.posted.begin());
}

void Notices::read_arriving(int peer, Waiter& waiter) {
  Line& line = *lines_[peer];
  std::unique_lock<std::mutex> lock(line.mutex);
  while (!line.reading && is_arriving(line)) read(line, lock, peer, waiter);
}

bool Notices::is_told(int peer, int32_t tag, fl_signature& call) {
  Line& line = *lines_[peer];
  const std::lock_guard<std::mutex> lock(line.mutex);
  for (const NoticePtr& told : line.told) {
    if (told->call.verb != FL_SEND || told->call.root != tag) continue;
    call = told->call;
    return true;
  }
  return false;
}

// Whether the first bytes of the next notice are there. Where its receive could not be posted there
// will be none.
bool Notices::is_arriving(Line& line) {
  return !line.posted.empty() &&
         __atomic_load_n(&line.posted.front()->call.sequence, __ATOMIC_ACQUIRE) != 0;
}

std::vector<fl_signature> Notices::unheard(int peer) {
  Line& line = *lines_[peer];
  const std::lock_guard<std::mutex> lock(line.mutex);
  std::vector<fl_signature> calls;
  for (const NoticePtr& told : line.told) calls.push_back(told->call);
  return calls;
}

}  // namespace fl
