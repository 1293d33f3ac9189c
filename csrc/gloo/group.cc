#include "group.h"

#include "../common/signature.h"
#include "../common/verbs.h"

namespace fl {
namespace {

fl_site site_of(const Request& call) { return call.site != nullptr ? *call.site : fl_site{}; }

// True if `timeout` names one late rank that has begun the same call: it waits for another rank itself.
bool waits_in(const Failure& timeout, const fl_signature& call) {
  return timeout.missing.size() == 1 && timeout.report.calls[timeout.missing[0]].sequence == call.sequence;
}

}  // namespace

Group::Group(std::unique_ptr<Mesh> mesh)
    : mesh_(std::move(mesh)),
      collectives_(*mesh_),
      port_(mesh_->family->engine, mesh_->group, mesh_->rank, mesh_->members(), *mesh_),
      queue_(*mesh_, mesh_->family->crew) {
  if (mesh_->group != 0) collectives_.open();  // a subgroup uses the connections of the whole group
}

std::shared_ptr<Operation> Group::connect(std::vector<char> addresses, size_t bytes,
                                          std::string key, bool lazily, double seconds) {
  const auto connect = [this, addresses = std::move(addresses), bytes, key = std::move(key),
                        lazily](Operation& operation) {
    mesh_->connect(addresses.data(), bytes, key.data(), lazily, operation.deadline);
    collectives_.open();
  };
  return queue_.submit(seconds, connect);
}

bool Group::is_ahead(int rank, fl_signature& call) {
  if (!queue_.enter()) return false;
  const bool is_ahead = collectives_.is_ahead(rank, call);
  queue_.leave();
  return is_ahead;
}

std::shared_ptr<Operation> Group::lost() {
  const auto reason = mesh_->reason();
  if (!mesh_->is_broken() && !mesh_->has_farewell() && !reason) return nullptr;
  // The loss of a host concerns other groups: report it even if an operation of this group has raised it.
  const bool concerns_others = reason && reason->status == FL_HOST_LOST;
  const bool was_raised = mesh_->is_broken() && !concerns_others;
  const Failure found = was_raised ? mesh_->why_broken() : mesh_->explain(-1, "it gave up");
  auto operation = ended_with(found.status, {found.what(), found.missing, {}, {}});
  operation->ended = Clock::now();
  return operation;
}

void Group::give_up(const std::string& why) {
  mesh_->fail(Failure(FL_RAISED, {mesh_->rank}, why));
}

Handle Group::start(const Request& call) {
  if (is_message(call.signature)) return port_.start(message_by(call, site_of(call)), call.seconds);
  if (auto refused = port_.refused()) return refused;
  return handle_of(queue_.submit(call.seconds, collective(call, nullptr)));
}

Handle Group::run(const Request& call) {
  if (is_message(call.signature)) return port_.run(message_by(call, site_of(call)), call.seconds, interrupt_);
  if (auto refused = port_.refused()) return refused;
  if (!queue_.enter()) return start(call);
  auto result = run_here(call.seconds, collective(call, interrupt_));
  queue_.leave();
  return handle_of(std::move(result));
}

std::shared_ptr<Operation> Group::run_here(double seconds, Task task) {
  auto operation = std::make_shared<Operation>();
  operation->shared = ended_;
  operation->seconds = seconds;
  operation->run = std::move(task);
  execute(*mesh_, *operation);
  const bool nothing_to_fetch = operation->status == FL_OK && operation->output.data == nullptr;
  return nothing_to_fetch ? nullptr : operation;
}

// Notify the other ranks that the group is closed, because a running operation keeps the sockets open.
void Group::close() {
  if (queue_.enter()) {
    collectives_.flush(Clock::now() + kLastMessages);
    queue_.leave();
  }
  mesh_->leave();  // otherwise this rank would be reported as lost
  port_.close();
  queue_.close();
  if (!queue_.is_idle()) mesh_->fail(Failure(FL_CLOSED, {}, kWasClosed));
}

// Collectives ---------------------------------------------------------------------------------

Group::Task Group::collective(const Request& request, InterruptCheck interrupt) {
  return [this, request = request, site = site_of(request), interrupt](Operation& operation) mutable {
    request.signature.sequence = sequence_of(++calls_);
    Waiter waiter(*mesh_, operation.deadline, interrupt);
    Call call{request.signature, site, operation.report, waiter};
    try {
      operation.output = do_verb(collectives_, call, request.signature, request.data, request.output);
    } catch (Failure& failure) {
      const bool is_late = failure.status == FL_TIMEOUT;
      if (is_late || failure.status == FL_PEER_LOST) {
        failure.report = collectives_.last_calls();
        failure.report.calls[mesh_->rank] = request.signature;
      }
      if (is_late && waits_in(failure, request.signature)) failure.missing = mesh_->cause_of(failure);
      throw;
    } catch (const Mismatch&) {
      throw;
    } catch (const std::exception& error) {
      throw mesh_->explain(-1, error.what());  // explain() may wait until the deadline of `waiter`
    }
  };
}

}  // namespace fl
