// Executes the steps of a script and compares the results.
#pragma once

#include <cstring>
#include <deque>
#include <thread>

#include "../../csrc/common/capi.h"
#include "check.h"
#include "reference.h"
#include "script.h"

namespace fl {
class Mapping;
}

namespace stress {

// By region and rank: the memory, and the bytes between the arrays of consecutive ranks.
using Regions = std::vector<std::vector<std::pair<std::shared_ptr<fl::Mapping>, size_t>>>;

constexpr char kUntouched = 0x5a;

inline std::string describe(const fl_signature& s) {
  return "verb " + std::to_string(s.verb) + " of " + std::to_string(s.count) + " " +
         info_of(s.dtype).name + ", op " + std::to_string(s.op) + ", root " +
         std::to_string(s.root) + ", scale " + std::to_string(s.scale) + ", ndim " +
         std::to_string(s.ndim) + ", part of " + std::to_string(s.part_of);
}

inline bool is_reduction(int verb) {
  return verb == FL_ALL_REDUCE || verb == FL_REDUCE || verb == FL_REDUCE_SCATTER ||
         verb == FL_REDUCE_SCATTER_UNEVEN || verb == FL_SCAN || verb == FL_EXSCAN;
}

// True if a rank that detects a mismatch waits until it knows the calls of all ranks.
template <typename Group>
constexpr bool waits_for_all = true;

// One call of one rank with its memory, until it has ended and was compared.
template <typename Group>
class Running {
 public:
  Running(Group& group, const Step& step, int rank, size_t number, char* in_region)
      : group_(group), step_(step), rank_(rank), number_(number), data_(in_region) {
    if (step.data != nullptr && data_ == nullptr) {
      own_.reset(new char[step.offset + step.data->size()]);  // the data ends with the allocation
      data_ = own_.get() + step.offset;
    }
    if (step.data != nullptr) copy(data_, *step.data);
    const size_t room = step.room == Room::kNone ? 0 : step.output_after->size();
    output_bytes_ = step.output_bytes + room + (step.room == Room::kDoesNotFit ? 8 : 0);
    output_.reset(new char[output_bytes_]);
    std::memset(output_.get(), kUntouched, output_bytes_);
    room_ = {output_.get(), output_bytes_};
    if (step.sections != nullptr) sections_ = {data_, step.sections->data()};
  }

  void call() {
    const fl_signature& s = step_.signature;
    static const fl_site here{"here"};
    const fl_site* site = step_.may_run_ahead ? &here : nullptr;
    const auto started = [&] { return group_.start({s, data(), output(), step_.peer, kForever}); };
    const auto run = [&] { return group_.run({s, data(), output(), step_.peer, kForever, site}); };
    switch (step_.how) {
      case How::kExchange:
        break;  // see exchange()
      case How::kStart:
        handle_ = started();
        break;
      case How::kRun:
        handle_ = run();
        break;
      case How::kInTwoSteps:
        if (group_.begin(s, data(), kForever, site)) {
          group_.ready(static_cast<int>(number_ % 3) * 50);
          handle_ = fl::handle_of(group_.finish(s, data(), output()));
        } else {
          handle_ = run();
        }
    }
  }

  fl_message message() const { return {step_.signature, data_, step_.peer, {}, nullptr}; }
  void has_become(fl::Handle handle) { handle_ = std::move(handle); }

  // Wait for the started call and compare the results; return its status.
  fl_status end() {
    fl_status status = FL_OK;
    if (handle_ != nullptr) {
      do {
        status = fl_op_wait(handle_.get(), 1.0);
      } while (status == FL_PENDING);
    }
    const bool may_be = step_.may_differ && (status == FL_OK || status == FL_MISMATCH);
    if (status != step_.status && !may_be) {
      report("status " + std::to_string(status) + " instead of " + std::to_string(step_.status) +
             ", \"" + fl_op_message(handle_.get()) + "\"");
    }
    if (step_.differs && status == FL_OK) return status;  // its data may be wrong
    if (!step_.from.empty()) {
      compare_match();
      return status;
    }
    const bool is_changed = step_.data_after != nullptr && status == FL_OK;
    compare(is_changed ? step_.data_after : step_.data, data_, "data", status);
    if (status == FL_MISMATCH) {
      compare_signatures();
    } else if (step_.output_after != nullptr) {
      compare_output();
    }
    return status;
  }

  const Step& step() const { return step_; }
  [[noreturn]] void report(const std::string& what) {
    fail("rank " + std::to_string(rank_) + ", step " + std::to_string(number_) + ", " +
         describe(step_.signature) + (step_.region >= 0 ? ", in a region" : "") +
         (step_.how == How::kStart ? ", started" : "") +
         (step_.how == How::kExchange ? ", in an exchange" : "") + ": " + what);
  }

 private:
  void* data() { return step_.sections != nullptr ? static_cast<void*>(&sections_) : data_; }

  void* output() {
    const bool may_have_room = step_.signature.verb == FL_ALL_GATHER || step_.signature.verb == FL_GATHER;
    if (may_have_room) return step_.room == Room::kNone ? nullptr : &room_;
    if (step_.signature.verb == FL_RECV) return step_.from.empty() ? nullptr : &match_;
    return step_.gathers ? nullptr : output_.get();
  }

  void compare_match() {
    if (match_.source < 0 || step_.from[match_.source] == nullptr) {
      report("a message of rank " + std::to_string(match_.source));
    }
    const Block& sent = step_.from[match_.source];
    const auto rows = static_cast<int64_t>(sent->size() / step_.signature.itemsize);
    if (match_.rows != rows) report(std::to_string(match_.rows) + " rows of " + std::to_string(rows));
    compare(sent, data_, "data");
  }

  void compare_output() {
    size_t bytes = output_bytes_;
    const char* output = output_.get();
    if (step_.gathers && step_.room != Room::kFits) {
      if (handle_ == nullptr) report("nothing was gathered");
      output = static_cast<const char*>(fl_op_output(handle_.get(), &bytes));
      check_untouched("a room that does not fit was written to");
    }
    if (bytes != step_.output_after->size()) {
      report("output of " + std::to_string(bytes) + " bytes");
    }
    compare(step_.output_after, output, "output");
  }

  void check_untouched(const char* otherwise) {
    for (size_t i = 0; i < output_bytes_; ++i) {
      if (output_[i] != kUntouched) report(otherwise);
    }
  }

  static void copy(char* to, const std::vector<char>& from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }

  void compare(const Block& wanted, const char* got, const char* what, fl_status status = FL_OK) {
    if (wanted == nullptr || wanted->empty()) return;
    const fl_signature& s = step_.signature;
    if (is_reduction(s.verb) && status == FL_OK) {
      const std::string wrong = difference(s.dtype, got, wanted->data(), wanted->size() / s.itemsize, true);
      if (!wrong.empty()) report(std::string(what) + ": " + wrong);
    } else if (std::memcmp(got, wanted->data(), wanted->size()) != 0) {
      size_t at = 0;
      while (got[at] == (*wanted)[at]) ++at;
      report(std::string(what) + " differ from byte " + std::to_string(at) + " on");
    }
  }

  void compare_signatures() {
    check_untouched("a mismatch has written output");
    const fl_signature* seen = fl_op_signatures(handle_.get());
    for (size_t r = 0; r < step_.seen.size(); ++r) {
      if (step_.seen[r].sequence == 0) continue;
      fl_signature theirs = seen[r];
      if (theirs.sequence == 0 && !waits_for_all<Group>) continue;
      if (theirs.sequence == 0) report("the signature of rank " + std::to_string(r) + " is missing");
      theirs.sequence = step_.seen[r].sequence;
      if (std::memcmp(&theirs, &step_.seen[r], sizeof theirs) != 0) {
        report("rank " + std::to_string(r) + " is said to have called " + describe(theirs) +
               " instead of " + describe(step_.seen[r]));
      }
    }
  }

  Group& group_;
  const Step& step_;
  const int rank_;
  const size_t number_;
  std::unique_ptr<char[]> own_, output_;
  size_t output_bytes_ = 0;
  fl_room room_{};
  fl_sections sections_{};
  fl_match match_{-1, 1, 0, -1.0, nullptr};
  char* data_;
  fl::Handle handle_;
};

// The calls of one rank, in order. `Group` has the functions of fl::ShmGroup.
template <typename Group>
class Player {
 public:
  // `regions`: by region and rank.
  Player(Group& group, int rank, Regions& regions)
      : group_(group), rank_(rank), regions_(regions), arrays_(regions.size()) {}

  void play(const std::vector<Step>& steps) {
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].how == How::kExchange) {
        i = exchange(steps, i) - 1;
      } else {
        play(steps[i], i);
      }
    }
    end_all();
  }

 private:
  void play(const Step& step, size_t number) {
    if (step.adds >= 0) {
      auto& [mapping, stride] = regions_[step.adds][rank_];
      arrays_[step.adds] = static_cast<char*>(group_.add_region(std::move(mapping), stride));
      return;
    }
    if (step.drops >= 0 || step.region >= 0) end_all();
    if (step.drops >= 0) {
      while (!group_.drop_region(arrays_[step.drops])) std::this_thread::yield();  // it is busy
      return;
    }
    running_.emplace_back(group_, step, rank_, number,
                          step.region >= 0 ? arrays_[step.region] + step.offset : nullptr);
    running_.back().call();
    if (step.how != How::kStart || step.wait || step.region >= 0) end_all();
  }

  // Return the number of the first step after the exchange.
  size_t exchange(const std::vector<Step>& steps, size_t begin) {
    const size_t before = running_.size();
    std::vector<fl_message> messages;
    size_t end = begin;
    for (; end < steps.size() && steps[end].how == How::kExchange; ++end) {
      running_.emplace_back(group_, steps[end], rank_, end, nullptr);
      messages.push_back(running_.back().message());
    }
    const int count = static_cast<int>(messages.size());
    auto ended = group_.exchange(messages.data(), count, kForever, begin % 2 != 0);
    for (size_t i = 0; i < ended.size(); ++i) {
      running_[before + i].has_become(std::move(ended[i]));
    }
    end_all();
    return end;
  }

  void end_all() {
    for (Running<Group>& one : running_) {
      const bool was_told = one.end() == FL_MISMATCH;
      if (one.step().differs) is_told_ = false;
      is_told_ = is_told_ || was_told;
      if (one.step().tells && !is_told_) one.report("a mismatch was told to other ranks alone");
    }
    running_.clear();
  }

  Group& group_;
  const int rank_;
  Regions& regions_;
  std::deque<Running<Group>> running_;
  std::vector<char*> arrays_;
  bool is_told_ = false;  // the last mismatch of collectives was raised
};

}  // namespace stress
