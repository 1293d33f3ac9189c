/* The comparison between hosts: waits of ranks for each other, their limits, and the reports.
 *
 * The model contains failures/agreement.py, and the code that decides how a wait ends: csrc/shm/peers.cc
 * inside a host, csrc/gloo/mesh.cc between hosts, and backends/hierarchical.py. The first call is small, a
 * large reduce_scatter, or one that all ranks make together. There is one fault: a rank dies, calls another
 * verb, or stalls temporarily or forever, at any moment.
 *
 *   -DSHAPE=22  2 hosts of 2 ranks; 31: 3 hosts of 1; 21: a host of 2 and one of 1; -DCALLS=2 calls in a row
 *   -DMUTANT=   a mutant in tests/model/test_hosts.py: the model without one of its parts
 *
 * Time advances by one when no process can continue: Promela's `timeout`. So all messages in transit arrive,
 * in any order, before the next limit passes; limits that pass at the same moment are noticed in any order. A
 * limit is T, plus STEP for each application of between_hosts; the calls of ranks without a fault are at most
 * SKEW apart, which is less than STEP. The library has the same assumption: hosts whose calls are further
 * apart than the addition of between_hosts may name each other.
 *
 * Simplification: messages of one rank to several ranks over Gloo arrive at once, unless the victim dies in
 * between, or stalls there in FLAT, whose data takes time. If a rank stops between the announcements of a
 * small call, within microseconds, other ranks may also name waiting ranks.
 */

#if SHAPE == 22
#define N 4
#else
#define N 3
#endif
#define SIZE (SHAPE == 31 -> 1 : 2)  /* ranks of the first host */
#define HOST(r) ((r) / SIZE)
#define LOCAL(r) ((r) % SIZE)
#define LEADERS (SHAPE == 22 -> 2 : 1)

#define T 4
#define SKEW 1
#ifndef MUTANT
#define MUTANT NOTHING
#endif
#define STEP (MUTANT == NO_NESTING -> 0 : 2)
#define between_hosts(seconds, times) ((seconds) + (times) * STEP)
#define FAR between_hosts(T, 3)
#define NEVER 255

/* Parts of a hierarchical backend and their members. */
#define INSIDE 0
#define BETWEEN 1
#define FLAT 2
#define PARTS 3
#define JOINS(part, p, q)                                                       \
  ((p) != (q) && ((part) == FLAT || ((part) == INSIDE && HOST(p) == HOST(q)) || \
                  ((part) == BETWEEN && LOCAL(p) == LOCAL(q) && LOCAL(p) < LEADERS)))

/* Reasons for the end of a wait, as sent to peers, each with a set of ranks. SAID: FL_RAISED with a text. */
#define LOST 32
#define LATE 64
#define SAID 128
#define NAMES 31
#define BIT(r) (1 << (r))

mtype = { NO_NESTING, NEVER_AHEAD, PATIENT_LEADER, NOT_PASSED_ON, NO_REASONS, LATE_ANYWAY, NO_FOR_OTHERS,
          NO_ZERO_INSIDE, NO_TIMEOUT, NO_NEIGHBOURS, IN_ORDER_OF_RANKS };  /* of MUTANT */
mtype = { SMALL, REDUCE, FLATLY, NOTHING, DIES, STALLS, DIFFERS };
mtype verb, fault;       /* of the first call; pending fault */
byte victim;             /* rank with the fault */
byte odd;                /* call that differs */
bool dead, asleep, struck, open;  /* state of the victim; the fault has struck; it may strike now */

byte due[N], entered[N]; /* remaining time of a wait; number of calls */
bool ended[N], gone[N];  /* end of a rank's program; of its connections */

/* In a part: number of q's calls known to p, q's farewell to p, and the value given with the calls. */
byte came[PARTS * N * N], told[PARTS * N * N], gave[PARTS * N * 2];
byte first[PARTS * N];   /* first rank whose farewell reached p, plus 1 */
bool connected[N * N];   /* in FLAT, which connects at first use */
#define AT(part, p, q) (((part) * N + (p)) * N + (q))
#define GAVE(part, q, n) gave[((part) * N + (q)) * 2 + (n) % 2]

#define FIRST(part, p) first[(part) * N + (p)]
#define CONNECTED(part, q) ((part) != FLAT || connected[me * N + (q)])
inline connects(part, peer) {
  if
  :: part == FLAT -> connected[me * N + peer] = true; connected[peer * N + me] = true
  :: else
  fi
}

#define IS_DEAD(q) (dead && victim == (q))
#define IS_ASLEEP(q) (asleep && victim == (q))
#define HAS(part, q) (!JOINS(part, me, q) || came[AT(part, me, q)] >= number[part])
#define IS_LOST(part, q) (JOINS(part, me, q) && (IS_DEAD(q) || told[AT(part, me, q)] != 0))
#define LAST (N - 1)
#define ALL_HAVE_CALLED(part) (HAS(part, 0) && HAS(part, 1) && HAS(part, 2) && HAS(part, LAST))
/* In memory a waiter checks all ranks; over Gloo the first one that has not called. */
#define LOSS_IN_MEMORY(part) \
  (IS_LOST(part, 0) || IS_LOST(part, 1) || IS_LOST(part, 2) || IS_LOST(part, LAST))
#define LOSS_BY_GLOO(part)                                                  \
  (!HAS(part, 0) -> IS_LOST(part, 0) : (!HAS(part, 1) -> IS_LOST(part, 1) : \
   (!HAS(part, 2) -> IS_LOST(part, 2) : IS_LOST(part, LAST))))
#define LOSS(part) ((part) == INSIDE -> LOSS_IN_MEMORY(part) : LOSS_BY_GLOO(part))

/* The victim may die or stall here; see init for `open`. */
#define STRIKES(how) (open && fault == how && victim == me)
inline dies() { fault = NOTHING; struck = true; dead = true; goto ends }
inline moment(may_stall) {
  if
  :: may_stall && STRIKES(STALLS) -> fault = NOTHING; struck = true; asleep = true; !asleep
  :: STRIKES(DIES) -> dies()
  :: true
  fi
}

/* farewell of peers.cc, explain of mesh.cc: the first rank that gave a reason, in rank order, or over Gloo in
 * order of time; 0: no rank. */
inline explain(part) {
  why = 0;
  for (q : 0 .. N - 1) {
    if
    :: why == 0 && JOINS(part, me, q) && told[AT(part, me, q)] != 0 &&
       (part == INSIDE || MUTANT == IN_ORDER_OF_RANKS || FIRST(part, me) == q + 1) ->
      why = told[AT(part, me, q)];
      why = why & ~SAID;
      if
      :: MUTANT == NO_REASONS || (MUTANT == NO_FOR_OTHERS && (why & BIT(me))) -> why = LOST | BIT(q)
      :: else -> why = (why & BIT(me) -> LATE | BIT(me) : why)     /* this rank is late: see for_others */
      fi
    :: else
    fi
  }
  q = 0
}

/* Backend.step, of gloo and shm that compare at once: announce, and wait for all. Sets `why` on failure. */
inline step(part, limit, content) {
  atomic {
    moment(true);
    number[part]++;
    GAVE(part, me, number[part]) = content;
    q = 0;
    do
    :: q < N && JOINS(part, me, q) ->
      moment(part == FLAT);
      if
      :: CONNECTED(part, q) || !(gone[q] || IS_DEAD(q)) ->
        connects(part, q);
        came[AT(part, q, me)]++;
        q++
      :: else -> refused = q; explain(FLAT); why = (why == 0 -> LOST | BIT(refused) : why); refused = 0; break
      fi
    :: q < N && !JOINS(part, me, q) -> q++
    :: q == N -> q = 0; due[me] = (MUTANT == NO_TIMEOUT -> NEVER : limit); break
    od
  };
  if
  :: atomic { why == 0 && STRIKES(DIES) -> dies() }
  :: d_step { why == 0 && ALL_HAVE_CALLED(part) -> due[me] = NEVER }
  :: atomic { why == 0 && !ALL_HAVE_CALLED(part) && LOSS(part) ->
       explain(part);
       why = (why == 0 -> LOST | BIT(victim) : why);               /* the vanished rank */
       failed = part; goto raises }
  :: atomic { why == 0 && !ALL_HAVE_CALLED(part) && due[me] == 0 ->
       explain(part);
       why = (MUTANT == LATE_ANYWAY -> 0 : why);
       if
       :: why == 0 -> why = LATE; for (q : 0 .. N - 1) { why = why | (HAS(part, q) -> 0 : BIT(q)) }
       :: else
       fi;
       failed = part; goto raises }
  :: why != 0 -> failed = part; goto raises
  fi
}

/* give_up of Transport::fail, and connect_neighbours: inform every peer once. In memory all see it at once. A
 * stopped process does not answer new connections. */
#define REACHES(part, q)                                                                            \
  (JOINS(part, me, q) && (CONNECTED(part, q) || (MUTANT != NO_NEIGHBOURS && !gone[q] && !IS_DEAD(q))))
inline give_up(part, words) {
  atomic {
    q = (given & BIT(part) -> N : 0);
    given = given | BIT(part);
    do
    :: q == N -> q = 0; break
    :: else ->
      if
      :: REACHES(part, q) ->
        told[AT(part, q, me)] = words;
        connects(part, q);
        first[part * N + q] = (FIRST(part, q) == 0 -> me + 1 : FIRST(part, q))
      :: JOINS(part, me, q) && !CONNECTED(part, q) && IS_ASLEEP(q)
      :: else
      fi;
      q++
    od
  }
}

/* 0, which is no call's digest, if the digests of the last step differ or one of them is 0. */
inline _one_of(part) {
  d_step {
    digest = GAVE(part, me, number[part]);
    for (q : 0 .. N - 1) {
      digest = (JOINS(part, me, q) && GAVE(part, q, number[part]) != digest -> 0 : digest)
    }
    q = 0
  }
}

inline meet() {
  seconds = (is_ahead -> between_hosts(T, 4) : T);
  is_ahead = false;
  step(INSIDE, seconds, digest);                                   /* GATHER */
  if
  :: LOCAL(me) == 0 ->
    _one_of(INSIDE);
    sent = digest;
    step(BETWEEN, between_hosts(seconds, 1), digest);              /* ALL_GATHER */
    _one_of(BETWEEN);
    digest = (MUTANT == NO_ZERO_INSIDE -> sent : digest);
    sent = 0
  :: else
  fi;
  seconds = (LOCAL(me) == 0 && MUTANT != PATIENT_LEADER -> T : between_hosts(seconds, 2));
  step(INSIDE, seconds, digest);                                   /* ALL_GATHER of the answer */
  digest = GAVE(INSIDE, HOST(me) * SIZE, number[INSIDE]);
  seconds = 0
}

/* In a large reduce_scatter, a rank may wait for other hosts when other ranks of its host are done. */
inline reduce() {
  step(INSIDE, T, 1);
  if :: LOCAL(me) == 0 -> step(BETWEEN, FAR, 1) :: else -> is_ahead = (MUTANT != NEVER_AHEAD) fi
}

inline _flatly() {
  step(FLAT, FAR, 1);
  is_ahead = (MUTANT != NEVER_AHEAD)
}

proctype rank(byte me) {
  byte number[PARTS], q, why, failed, given, digest, sent, seconds, call, refused;
  bool is_ahead;
  do
  :: call < CALLS ->
    if :: true :: SKEW > 0 -> due[me] = SKEW; due[me] == 0 fi;
    atomic {
      due[me] = NEVER;
      moment(true);
      call++;
      entered[me] = call;
      digest = (fault == DIFFERS && victim == me && odd == call -> 2 : 1);
      struck = (struck || digest == 2)
    };
    meet();
    if
    :: digest == 0 ->                                              /* reach raises _differences */
      step(FLAT, between_hosts(T, 1), 0);
      assert(fault == DIFFERS && odd == call)
    :: else ->
      assert(!(fault == DIFFERS && odd == call));                  /* no rank has a result */
      if
      :: call == 1 && verb == REDUCE -> reduce()
      :: call == 1 && verb == FLATLY -> _flatly()
      :: else
      fi;
      d_step { for (q : 0 .. N - 1) { assert(entered[q] >= call) }; q = 0 }
    fi
  :: else -> goto ends
  od;
raises: /* _run of HierarchicalBackend: failed rank, knowledge of this host's ranks, end */
  due[me] = NEVER;
  give_up(failed, why);
  atomic {
    if
    :: why & LOST ->
      sent = why; explain(INSIDE);
      why = (why == 0 && dead && JOINS(INSIDE, me, victim) -> LOST | BIT(victim) : why);
      why = ((why & LOST) -> why : sent)
    :: else
    fi;
    assert(struck);                                                /* else no rank fails */
    assert(fault != DIFFERS);
    assert(victim == me || (why & NAMES) == BIT(victim))
  };
  given = (MUTANT == NOT_PASSED_ON -> 7 : given);
  give_up(INSIDE, SAID | why);
  give_up(BETWEEN, SAID | why);
  give_up(FLAT, SAID | why);
  gone[me] = true;
ends:
  atomic { due[me] = NEVER; ended[me] = true }
}

/* Initially and after each tick, choose whether the fault may strike at this moment. */
init {
  byte r, waiting;
  atomic {
    for (r : 0 .. N - 1) { due[r] = NEVER }
    select(victim : 0 .. N - 1);
    if :: verb = SMALL :: verb = REDUCE :: verb = FLATLY fi;
    if :: fault = DIES :: fault = STALLS :: fault = DIFFERS; select(odd : 1 .. CALLS) fi;
    if :: open = true :: true fi;
    for (r : 0 .. N - 1) { run rank(r) }
  }
  do
  :: atomic { timeout ->
      waiting = 0;
      for (r : 0 .. N - 1) { waiting = waiting + (due[r] != NEVER -> 1 : 0) }
      if :: waiting == 0 -> break :: else fi;
      for (r : 0 .. N - 1) { due[r] = (due[r] == NEVER -> NEVER : due[r] - 1) }
      if :: asleep -> asleep = false :: true fi;
      if :: fault == DIES || fault == STALLS -> open = true :: open = false fi
    }
  od;
  for (r : 0 .. N - 1) { assert(ended[r] || (asleep && victim == r)) }   /* no endless wait */
}
