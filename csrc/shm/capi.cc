// The C ABI; see ../common/capi.h for what becomes of exceptions.
#include "../common/capi.h"

#include <unistd.h>

#include <algorithm>
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
  std::exception_ptr error;  // of `not_posted`: why there are none
};

namespace {

thread_local fl_shm_posted not_posted;  // by this thread, where there may be no memory for another one

}  // namespace

struct fl_shm_region {
  std::shared_ptr<fl::Mapping> mapping;
  void* array;
};

namespace {

fl::Mapping map(const char* path, bool create, size_t bytes, bool reserve) {
  return create ? fl::Mapping::create(path, bytes, reserve) : fl::Mapping::open(path, bytes);
}

}  // namespace

extern "C" {

size_t fl_shm_bytes(int ranks) { return fl::Segment::bytes_for(ranks); }

fl_shm_group* fl_shm_open(const char* path, int create, int is_named, int rank, int size) {
  return fl::guarded<fl_shm_group*>(nullptr, [&] {
    fl::Mapping mapping = map(path, create != 0, fl::Segment::bytes_for(size), is_named != 0);
    if (is_named == 0) mapping.close_file();  // there may be many groups
    return new fl_shm_group{{std::move(mapping), rank, size}};
  });
}

fl_shm_group* fl_shm_part(fl_shm_group* whole, const int* ranks, unsigned number, const char* path, int create,
                          int is_named, int rank, int size) {
  return fl::guarded<fl_shm_group*>(nullptr, [&] {
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
    auto room = std::make_unique<fl_shm_posted>();
    auto posted = group->group.post(messages, count, seconds, spins);
    if (posted.empty()) return nullptr;
    *room = {count, &group->group, std::move(posted), nullptr};
    return room.release();
  } catch (...) {
    not_posted.count = count;
    not_posted.error = std::current_exception();
    return &not_posted;
  }
}

void fl_shm_deliver(fl_shm_posted* posted, fl_op** results) {
  fl::handles(results, posted->count, [&] {
    if (posted == &not_posted) std::rethrow_exception(std::exchange(posted->error, nullptr));
    const std::unique_ptr<fl_shm_posted> owned(posted);
    return posted->group->deliver(posted->messages);
  });
}

int fl_shm_begin(fl_shm_group* group, const fl_signature* signature, const void* data,
                 double seconds, const fl_site* site) {
  return fl::guarded(0, [&] { return group->group.begin(*signature, data, seconds, site) ? 1 : 0; });
}

int fl_shm_ready(fl_shm_group* group, int spins) {
  return fl::guarded<int>(FL_COMPLETE, [&] { return static_cast<int>(group->group.ready(spins)); });
}

fl_op* fl_shm_finish(fl_shm_group* group, const fl_signature* signature, void* data,
                     void* output) {
  return fl::handle([&] { return group->group.finish(*signature, data, output); });
}

fl_shm_region* fl_shm_add_region(fl_shm_group* group, const char* path, int create, size_t bytes) {
  return fl::guarded<fl_shm_region*>(nullptr, [&] {
    const auto mapping = std::make_shared<fl::Mapping>(
        map(path, create != 0, bytes * group->group.size(), create == 1));
    mapping->close_file();  // there may be many of them
    return new fl_shm_region{mapping, group->group.add_region(mapping, bytes)};
  });
}

void* fl_shm_region_array(fl_shm_region* region) { return region->array; }

void fl_shm_free_region(fl_shm_region* region) { delete region; }

int fl_shm_drop_region(fl_shm_group* group, void* array) {
  return fl::guarded(0, [&] { return group->group.drop_region(array) ? 1 : 0; });
}

int fl_shm_on_interrupt(fl_shm_group* group, int (*check)(void)) {
  return fl::done([&] { group->group.on_interrupt(check); });
}

int fl_shm_on_mismatch(fl_shm_group* group, void (*where)(fl_site*)) {
  return fl::done([&] { group->group.on_mismatch(where); });
}

int fl_shm_compare_at_once(fl_shm_group* group) {
  return fl::done([&] { group->group.compare_at_once(); });
}

int fl_shm_call_ranks(fl_shm_group* group, const int* numbers) {
  return fl::done([&] { group->group.call_ranks({numbers, numbers + group->group.size()}); });
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
  return fl::guarded(-1, [&] { return group->group.is_ahead(rank, *call) ? 1 : 0; });
}

fl_op* fl_shm_lost(fl_shm_group* group) {
  return fl::handle([&] { return group->group.lost(); });
}

int fl_shm_give_up(fl_shm_group* group, const char* why) {
  return fl::done([&] { group->group.give_up(why); });
}

int fl_shm_leave(fl_shm_group* group) {
  return fl::done([&] { group->group.leave(); });
}

int fl_shm_close(fl_shm_group* group) {
  return fl::done([&] { group->group.close(); });
}

// A child that was forked has the memory of the group, but none of its threads.
void fl_shm_free(fl_shm_group* group) {
  if (group->owner == getpid()) delete group;
}

int fl_shm_abandon(fl_shm_group* group) {
  return fl::done([&] { group->group.abandon(); });
}

}  // extern "C"
