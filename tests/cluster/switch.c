// A switch between tap devices. Every port has a cable of the same rate, delay and loss.
//
//   switch RATE DELAY LOSS SEED TAP...    bits/s (0: no limit), nanoseconds, fraction, descriptors
//
// A frame leaves its host when the frames before it have left; it then enters the cable of the other
// host when that is free, and arrives DELAY later. A host's number is the last byte of its MAC
// address, less one. Commands come on stdin, one a line: `cut N`, `mend N`, and `bytes N`, which
// prints how many bytes of data host N has sent and received, without the headers of Ethernet, IP and
// TCP. The end of stdin ends the switch.
//
// Frames keep their virtio header, so hosts hand over up to 64 KB at once, as to a card that cuts
// segments itself. They take the time of their segments.

#define _GNU_SOURCE
#include <errno.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PORTS = 64, HEADER = sizeof(struct virtio_net_hdr), LARGEST = HEADER + 65536 + 64 };
enum { ETHERNET = 14, SHORTEST = 60, AROUND = 24 };  // bytes; preamble, checksum and gap are around
enum { AT_ONCE = 16 };                               // frames of one port before others have a turn
static const int64_t SECOND = 1000000000;

struct frame {
  struct frame *next;
  int64_t due;
  uint32_t length, data, wire, segments;  // bytes: with the virtio header, of data, on the wire
  int from;
  uint8_t bytes[];
};

struct queue {
  struct frame *first, **last;
};

struct port {
  int tap;
  bool cut;
  int64_t sends_until, receives_until;
  struct queue leaving, arriving;
  uint64_t sent, received, random;
};

static struct port ports[MOST_PORTS];
static int count;
static double rate, loss;
static int64_t delay;

static void fail(const char *what) {
  fprintf(stderr, "switch: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * SECOND + time.tv_nsec;
}

static int64_t duration(double bytes) { return rate > 0 ? (int64_t)(bytes * 8 / rate * SECOND) : 0; }

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static void append(struct queue *queue, struct frame *frame) {
  if (!queue->first) queue->last = &queue->first;
  frame->next = NULL;
  *queue->last = frame;
  queue->last = &frame->next;
}

static struct frame *take(struct queue *queue) {
  struct frame *frame = queue->first;
  queue->first = frame->next;
  return frame;
}

// xorshift64*: the same frames of a port are lost whenever it sends the same.
static bool is_lost(struct port *port) {
  port->random ^= port->random >> 12;
  port->random ^= port->random << 25;
  port->random ^= port->random >> 27;
  return (double)((port->random * 2685821657736338717u) >> 11) * 0x1p-53 < loss;
}

static void measure(struct frame *frame) {
  const struct virtio_net_hdr *header = (const void *)frame->bytes;
  const uint8_t *bytes = frame->bytes + HEADER;
  uint32_t length = frame->length - HEADER, headers = ETHERNET;
  int type = bytes[12] << 8 | bytes[13], protocol = 0;
  if (type == 0x0800) {
    protocol = bytes[23];
    headers += (bytes[ETHERNET] & 15u) * 4;
  } else if (type == 0x86dd) {
    protocol = bytes[20];
    headers += 40;
  }
  if (protocol == 6 && headers + 20 <= length) headers += (bytes[headers + 12] >> 4u) * 4;
  frame->data = protocol && length > headers ? length - headers : 0;
  frame->segments = 1;
  if (header->gso_type != VIRTIO_NET_HDR_GSO_NONE && header->gso_size)
    frame->segments = (frame->data + header->gso_size - 1) / header->gso_size;
  frame->wire = length + (frame->segments - 1) * headers;
  frame->wire = (uint32_t)later(frame->wire, SHORTEST) + frame->segments * AROUND;
}

static void deliver(struct port *to, const struct frame *frame) {
  if (to->cut) return;
  to->received += frame->data;
  // A host that is gone, or has taken its device down, loses the frame.
  if (write(to->tap, frame->bytes, frame->length) < 0 && errno != EIO && errno != ENETDOWN &&
      errno != EINVAL)
    fail("write to a tap device");
}

// Let the frame into the cable to host `to`, where its first segment is at `time`.
static void enter(struct port *to, const struct frame *frame, int64_t time) {
  if (rate <= 0 && delay == 0) {
    deliver(to, frame);
    return;
  }
  struct frame *copy = malloc(sizeof *copy + frame->length);
  if (!copy) fail("malloc");
  memcpy(copy, frame, sizeof *copy + frame->length);
  to->receives_until = later(time, to->receives_until) + duration(frame->wire);
  copy->due = to->receives_until + delay;
  append(&to->arriving, copy);
}

static void forward(const struct frame *frame, int64_t time) {
  const uint8_t *address = frame->bytes + HEADER;
  int only = address[0] & 1 ? -1 : address[5] - 1;  // else for all
  for (int i = 0; i < count; ++i)
    if (i != frame->from && (only < 0 || only == i)) enter(&ports[i], frame, time);
}

static void read_from(int number) {
  static union {
    struct frame frame;
    uint8_t room[sizeof(struct frame) + LARGEST];
  } place;
  struct frame *frame = &place.frame;
  struct port *port = &ports[number];
  for (int i = 0; i < AT_ONCE; ++i) {
    ssize_t length = read(port->tap, frame->bytes, LARGEST);
    if (length < 0) {
      if (errno == EAGAIN || errno == EIO || errno == EBADFD) return;  // none, or it is down
      fail("read from a tap device");
    }
    if (length < HEADER + ETHERNET || port->cut) continue;
    frame->length = (uint32_t)length;
    frame->from = number;
    measure(frame);
    port->sent += frame->data;
    if (loss > 0 && is_lost(port)) continue;
    if (rate <= 0) {
      forward(frame, now());
      continue;
    }
    int64_t begins = later(now(), port->sends_until);
    port->sends_until = begins + duration(frame->wire);
    struct frame *copy = malloc(sizeof *copy + frame->length);
    if (!copy) fail("malloc");
    memcpy(copy, frame, sizeof *copy + frame->length);
    copy->due = begins + duration(frame->wire / frame->segments);
    append(&port->leaving, copy);
  }
}

// The queue whose first frame is due next; NULL if all are empty.
static struct queue *next_queue(struct port **whose) {
  struct queue *next = NULL;
  for (struct port *port = ports; port < ports + count; ++port) {
    struct queue *both[] = {&port->leaving, &port->arriving};
    for (int i = 0; i < 2; ++i)
      if (both[i]->first && (!next || both[i]->first->due < next->first->due)) {
        next = both[i];
        *whose = port;
      }
  }
  return next;
}

// Do what is due, in the order of its times; return when the next is due, or -1.
static int64_t do_what_is_due(void) {
  struct port *port = NULL;
  struct queue *queue;
  while ((queue = next_queue(&port))) {
    if (queue->first->due > now()) return queue->first->due;
    struct frame *frame = take(queue);
    if (queue == &port->leaving)
      forward(frame, frame->due);
    else
      deliver(port, frame);
    free(frame);
  }
  return -1;
}

static void obey(const char *line) {
  char command[16];
  int number;
  if (sscanf(line, "%15s %d", command, &number) != 2 || number < 0 || number >= count) {
    fprintf(stderr, "switch: not understood: %s", line);
    exit(1);
  }
  struct port *port = &ports[number];
  if (strcmp(command, "bytes") == 0)
    printf("%llu %llu\n", (unsigned long long)port->sent, (unsigned long long)port->received);
  else {
    port->cut = strcmp(command, "cut") == 0;
    printf("done\n");
  }
  fflush(stdout);
}

static void wait_and_read(struct pollfd *polled, int64_t until) {
  int64_t left = until < 0 ? 0 : later(until - now(), 0);
  struct timespec time = {left / SECOND, left % SECOND};
  if (ppoll(polled, (nfds_t)count + 1, until < 0 ? NULL : &time, NULL) < 0) fail("ppoll");
  for (int i = 0; i < count; ++i)
    if (polled[i].revents & POLLIN) read_from(i);
  if (polled[count].revents) {
    char line[64];
    if (!fgets(line, sizeof line, stdin)) exit(0);
    obey(line);
  }
}

int main(int argc, char **argv) {
  if (argc < 6 || argc - 5 > MOST_PORTS) {
    fprintf(stderr, "usage: switch RATE DELAY LOSS SEED TAP...\n");
    return 2;
  }
  rate = atof(argv[1]);
  delay = atoll(argv[2]);
  loss = atof(argv[3]);
  count = argc - 5;
  struct pollfd polled[MOST_PORTS + 1];
  for (int i = 0; i < count; ++i) {
    ports[i].tap = atoi(argv[5 + i]);
    ports[i].random = (strtoull(argv[4], NULL, 10) * MOST_PORTS + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    polled[i] = (struct pollfd){.fd = ports[i].tap, .events = POLLIN};
  }
  polled[count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
  setvbuf(stdin, NULL, _IONBF, 0);  // poll sees what is not read yet
  prctl(PR_SET_TIMERSLACK, 1);
  setpriority(PRIO_PROCESS, 0, -20);  // a cable does not wait for a processor
  for (;;) wait_and_read(polled, do_what_is_due());
}
