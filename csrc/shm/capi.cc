// The C ABI: every exception becomes a status and a message.
#include "../common/capi.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "abi.h"
#include "group.h"

struct fl_shm_group {
  fl::ShmGroup group;
  const pid_t owner = getpid();
};

struct fl_shm_posted {
  int count;
  fl::ShmGroup* group;
  fl::Port::Posted messages;
  std::exception_ptr error;  // why there are none
};

struct fl_shm_region {
  std::shared_ptr<fl::Mapping> mapping;
  void* array;
};

namespace {

fl::Mapping map(const char* path, bool create, size_t bytes, bool reserve) {
  return create ? fl::Mapping::create(path, bytes, reserve) : fl::Mapping::open(path, bytes);
}

// Run `body`; what it throws becomes a message and `otherwise`.
template <typename Result, typename Body>
Result guarded(Result otherwise, char* message, size_t message_bytes, Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    fl::copy_message(error.what(), message, message_bytes);
    return otherwise;
  }
}

}  // namespace

extern "C" {

size_t fl_shm_bytes(int ranks) { return fl::Segment::bytes_for(ranks); }

fl_shm_group* fl_shm_open(const char* path, int create, int is_named, int rank, int size, char* message,
                          size_t message_bytes) {
  return guarded<fl_shm_group*>(nullptr, message, message_bytes, [&] {
    fl::Mapping mapping = map(path, create != 0, fl::Segment::bytes_for(size), is_named != 0);
    if (is_named == 0) mapping.close_file();  // there may be many groups
    return new fl_shm_group{{std::move(mapping), rank, size}};
  });
}

fl_shm_group* fl_shm_part(fl_shm_group* whole, const int* ranks, unsigned number, const char* path, int create,
                          int is_named, int rank, int size, char* message, size_t message_bytes) {
  return guarded<fl_shm_group*>(nullptr, message, message_bytes, [&] {
    fl::Mapping mapping = map(path, create != 0, fl::Segment::bytes_for(size, false), is_named != 0);
    if (is_named == 0) mapping.close_file();
    return new fl_shm_group{{whole->group, std::move(mapping), rank, {ranks, ranks + size}, number}};
  });
}

fl_op* fl_shm_run(fl_shm_group* group, const fl_signature* signature, void* data, void* output,
                  int peer, double seconds, int async, const fl_site* site) {
  if (async != 0) {
    const bool is_ahead = async == FL_AHEAD;
    return fl::handle([&] { return group->group.start(*signature, data, output, peer, seconds, site, is_ahead); });
  }
  return fl::handle([&] { return group->group.run(*signature, data, output, peer, seconds, site); });
}

void fl_shm_exchange(fl_shm_group* group, const fl_message* messages, int count, double seconds,
                     int async, fl_op** results) {
  fl::handles(results, count, [&] {
    fl::ShmGroup& ranks = group->group;
    return async != 0 ? ranks.start_exchange(messages, count, seconds)
                      : ranks.exchange(messages, count, seconds);
  });
}

fl_shm_posted* fl_shm_post(fl_shm_group* group, const fl_message* messages, int count, double seconds,
                           int spins) {
  try {
    auto posted = group->group.post(messages, count, seconds, spins);
    return posted.empty() ? nullptr : new fl_shm_posted{count, &group->group, std::move(posted), nullptr};
  } catch (const std::exception&) {
    return new fl_shm_posted{count, nullptr, {}, std::current_exception()};
  }
}

void fl_shm_deliver(fl_shm_posted* posted, fl_op** results) {
  const std::unique_ptr<fl_shm_posted> owned(posted);
  fl::handles(results, posted->count, [&] {
    if (posted->error != nullptr) std::rethrow_exception(posted->error);
    return posted->group->deliver(posted->messages);
  });
}

int fl_shm_begin(fl_shm_group* group, const fl_signature* signature, const void* data,
                 double seconds, const fl_site* site) {
  return group->group.begin(*signature, data, seconds, site) ? 1 : 0;
}

int fl_shm_ready(fl_shm_group* group, int spins) {
  return static_cast<int>(group->group.ready(spins));
}

fl_op* fl_shm_finish(fl_shm_group* group, const fl_signature* signature, void* data,
                     void* output) {
  return fl::handle([&] { return group->group.finish(*signature, data, output); });
}

fl_shm_region* fl_shm_add_region(fl_shm_group* group, const char* path, int create, size_t bytes,
                                 char* message, size_t message_bytes) {
  return guarded<fl_shm_region*>(nullptr, message, message_bytes, [&] {
    const auto mapping = std::make_shared<fl::Mapping>(
        map(path, create != 0, bytes * group->group.size(), create == 1));
    mapping->close_file();  // there may be many of them
    return new fl_shm_region{mapping, group->group.add_region(mapping, bytes)};
  });
}

void* fl_shm_region_array(fl_shm_region* region) { return region->array; }

void fl_shm_free_region(fl_shm_region* region) { delete region; }

int fl_shm_drop_region(fl_shm_group* group, void* array) {
  return group->group.drop_region(array) ? 1 : 0;
}

void fl_shm_on_interrupt(fl_shm_group* group, int (*check)(void)) {
  group->group.on_interrupt(check);
}

void fl_shm_on_mismatch(fl_shm_group* group, void (*where)(fl_site*)) {
  group->group.on_mismatch(where);
}

void fl_shm_compare_at_once(fl_shm_group* group) { group->group.compare_at_once(); }

void fl_shm_call_ranks(fl_shm_group* group, const int* numbers) {
  group->group.call_ranks({numbers, numbers + group->group.size()});
}

fl_op* fl_shm_look_back(fl_shm_group* group, double seconds, int* is_behind) {
  return fl::handle([&] {
    bool behind = false;
    auto found = group->group.look_back(seconds, behind);
    *is_behind = behind ? 1 : 0;
    return found;
  });
}

int fl_shm_is_ahead(fl_shm_group* group, int rank, fl_signature* call) {
  return group->group.is_ahead(rank, *call) ? 1 : 0;
}

fl_op* fl_shm_lost(fl_shm_group* group) {
  return fl::handle([&] { return group->group.lost(); });
}

void fl_shm_give_up(fl_shm_group* group, const char* why) {
  group->group.give_up(why);
}

void fl_shm_leave(fl_shm_group* group) { group->group.leave(); }

void fl_shm_close(fl_shm_group* group) { group->group.close(); }

// A child that was forked has the memory of the group, but none of its threads.
void fl_shm_free(fl_shm_group* group) {
  if (group->owner == getpid()) delete group;
}

void fl_shm_abandon(fl_shm_group* group) { group->group.abandon(); }

}  // extern "C"
