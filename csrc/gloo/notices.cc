#include "notices.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

namespace fl {
namespace {

// Notices of a peer that can be on their way at once.
constexpr size_t kPosted = 4;

// Only a small send has its payload with it.
size_t payload_of(const fl_signature& call) {
  return call.verb == FL_SEND && !is_large(call) ? bytes_of(call) : 0;
}

}  // namespace

struct Notices::Line {
  std::array<Notice, kPosted> incoming;
  std::array<Buffer, kPosted> buffers;
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::list<Told> told;  // in the order in which it came
  size_t next = 0;       // where the next notice arrives
  bool reading = false;  // a thread waits for it
};

Notices::Notices(Mesh& mesh) : mesh_(mesh), lines_(mesh.size) {}

Notices::~Notices() = default;

void Notices::open() {
  for (int peer = 0; peer < mesh_.size; ++peer) {
    if (peer == mesh_.rank) continue;
    lines_[peer] = std::make_unique<Line>();
    Line& line = *lines_[peer];
    for (size_t place = 0; place < kPosted; ++place) {
      line.buffers[place] = mesh_.buffer(&line.incoming[place], sizeof(Notice));
      post(line, peer, place);
    }
  }
}

void Notices::post(Line& line, int peer, size_t place) {
  try {
    line.buffers[place]->recv(peer, kNoticeSlot);
  } catch (const std::exception&) {
    // This peer has left already, after a message that succeeded. Who waits for another one hears
    // of it from the watch.
    return;
  }
}

Buffer Notices::give(const Notice& notice, int peer) {
  Buffer buffer = mesh_.buffer(&notice, offsetof(Notice, payload) + payload_of(notice.call));
  buffer->send(peer, kNoticeSlot);
  return buffer;
}

Told Notices::hear(int peer, int verb, int32_t tag, Waiter& waiter) {
  Line& line = *lines_[peer];
  std::unique_lock<std::mutex> lock(line.mutex);
  for (;;) {
    const auto found = std::find_if(line.told.begin(), line.told.end(), [&](const Told& told) {
      return told.call.verb == verb && told.call.root == tag;
    });
    if (found != line.told.end()) {
      Told told = std::move(*found);
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
void Notices::read(Line& line, std::unique_lock<std::mutex>& lock, int peer, Waiter& waiter) {
  const size_t place = line.next;
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
  waiter.received(*line.buffers[place], peer);
  const Notice& notice = line.incoming[place];
  Told told{notice.call, {notice.payload, notice.payload + payload_of(notice.call)}};
  post(line, peer, place);
  lock.lock();
  line.told.push_back(std::move(told));
  line.next = (place + 1) % kPosted;
}

std::vector<fl_signature> Notices::unheard(int peer) {
  Line& line = *lines_[peer];
  const std::lock_guard<std::mutex> lock(line.mutex);
  std::vector<fl_signature> calls;
  for (const Told& told : line.told) calls.push_back(told.call);
  return calls;
}

}  // namespace fl
