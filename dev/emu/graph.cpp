/* graph.cpp -- captures of streams, and the graphs they become.
 *
 * A capture is a list of operations with the ones each comes after. A graph replays it on streams of its own,
 * one for each stream that took part, with events between them: so it meets the same schedules, and the
 * checker sees the same order, as the calls themselves.
 */
#include "dev/emu/runtime.h"
#include <algorithm>
#include <pthread.h>

namespace emu {
namespace {
struct Node {
    Op* op;                      // or, for an event that is recorded for, or was recorded, outside: NULL,
    CUevent_st* event = nullptr; // the event,
    bool record = false;         // and which of the two
    int lane = 0;                // which of the capture's streams
    std::vector<int> after;
};

// what a graph and its executable share
struct Nodes {
    std::vector<Node> nodes;
    std::vector<std::string> lanes; // names of the streams
    bool instantiated = false;
    ~Nodes() {
        for (Node& n : nodes) {
            delete n.op;
        }
    }
};
} // namespace

struct Capture {
    unsigned long id;
    CUstream_st* origin;
    pthread_t thread;
    cudaStreamCaptureMode mode;
    bool failed = false;
    std::vector<CUstream_st*> streams; // that take part; the origin first
    std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
};

namespace {
// one run of a node: it belongs to the graph, which outlives the run
struct NodeOp : Op {
    Op* op;
    void queued() override { op->queued(); }
    void start() override {
        op->stream = stream;
        op->start();
    }
    bool poll() override {
        bool done = op->poll();
        what = op->what; // it may say more by now
        return done;
    }
};

// under lock: one run of the node
void push_node(CUstream_st* lane, const Node& node) {
    if (!node.op && node.record) {
        node.event->record = push_record(lane);
        node.event->captured = false;
    } else if (!node.op) {
        if (node.event->record) {
            push_wait(lane, node.event->record);
        } // the recording as it is at the launch
    } else {
        NodeOp* op = new NodeOp();
        op->what = node.op->what;
        op->op = node.op;
        push(lane, op);
    }
}

Capture* find_capture(unsigned long id) {
    for (Capture* c : runtime().captures) {
        if (c->id == id) { return c; }
    }
    return nullptr;
}

void add_all(std::vector<int>& to, const std::vector<int>& nodes) {
    for (int n : nodes) {
        if (std::find(to.begin(), to.end(), n) == to.end()) { to.push_back(n); }
    }
}

// are all of these among, or before, those?
bool covered(const Nodes& nodes, const std::vector<int>& these, const std::vector<int>& those) {
    std::vector<bool> before(nodes.nodes.size(), false);
    for (int n : those) {
        before[(size_t)n] = true;
    }
    for (size_t i = nodes.nodes.size(); i > 0; i--) { // a node comes after earlier ones only
        for (int n : nodes.nodes[i - 1].after) {
            if (before[i - 1]) { before[(size_t)n] = true; }
        }
    }
    return std::all_of(these.begin(), these.end(), [&before](int n) { return before[(size_t)n]; });
}

// appends the node to the stream's; under lock
void add_node(CUstream_st* s, Node node) {
    Capture* c = s->capture;
    node.lane = (int)(std::find(c->streams.begin(), c->streams.end(), s) - c->streams.begin());
    node.after = s->tail;
    c->nodes->nodes.push_back(node);
    s->tail = {(int)c->nodes->nodes.size() - 1};
}

cudaError_t fail_capture(Capture* c, cudaError_t e) {
    c->failed = true;
    return e;
}
} // namespace

cudaError_t refuse_in_capture() {
    Runtime& rt = runtime();
    Guard guard(rt.lock);
    for (Capture* c : rt.captures) {
        bool own = pthread_equal(c->thread, pthread_self());
        if (c->mode == cudaStreamCaptureModeGlobal || (c->mode == cudaStreamCaptureModeThreadLocal && own)) {
            return fail_capture(c, cudaErrorStreamCaptureUnsupported);
        }
    }
    return cudaSuccess;
}

cudaError_t refuse_in_capture_of(CUstream_st* s) {
    return fail_capture(s->capture, cudaErrorStreamCaptureUnsupported);
}

cudaError_t capture_op(CUstream_st* s, Op* op) {
    if (s->capture->failed) {
        delete op;
        return fail(cudaErrorStreamCaptureInvalidated);
    }
    add_node(s, Node{op, nullptr, false, 0, {}});
    return cudaSuccess;
}

cudaError_t capture_record(CUevent_st* e, CUstream_st* s, bool external) {
    Capture* c = s->capture;
    if (c->failed) { return fail(cudaErrorStreamCaptureInvalidated); }
    if (external) {
        add_node(s, Node{nullptr, e, true, 0, {}});
        return cudaSuccess;
    }
    e->captured = true;
    e->capture_id = c->id;
    e->nodes = s->tail;
    e->record = nullptr;
    return cudaSuccess;
}

cudaError_t capture_wait(CUstream_st* s, CUevent_st* e, bool external) {
    if (s->capture && s->capture->failed) { return fail(cudaErrorStreamCaptureInvalidated); }
    if (s->capture && external) {
        add_node(s, Node{nullptr, e, false, 0, {}});
        return cudaSuccess;
    }
    Capture* c = e->captured ? find_capture(e->capture_id) : nullptr;
    if (!c) { // the event was recorded outside, or in a capture that has ended
        if (!s->capture) { return fail(cudaErrorCapturedEvent); }
        return fail(fail_capture(s->capture, cudaErrorStreamCaptureIsolation));
    }
    if (s->capture && s->capture != c) {
        c->failed = true;
        return fail(fail_capture(s->capture, cudaErrorStreamCaptureMerge));
    }
    if (c->failed) { return fail(cudaErrorStreamCaptureInvalidated); }
    if (!s->capture) {
        s->capture = c;
        s->tail.clear();
        c->streams.push_back(s);
    }
    add_all(s->tail, e->nodes);
    return cudaSuccess;
}
} // namespace emu

using namespace emu;

struct CUgraph_st {
    std::shared_ptr<Nodes> nodes;
};

struct CUgraphExec_st {
    std::shared_ptr<Nodes> nodes;
    std::vector<CUstream_st*> lanes;
    std::vector<std::shared_ptr<Record>> last; // the ends of the last launch
};

extern "C" {
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
    Runtime& rt = enter("cudaStreamBeginCapture");
    require_stream("cudaStreamBeginCapture", s);
    Guard guard(rt.lock);
    if (s->capture) { return fail(cudaErrorIllegalState); }
    Capture* c = new Capture();
    c->id = ++rt.ncaptures;
    c->origin = s;
    c->thread = pthread_self();
    c->mode = mode;
    c->streams.push_back(s);
    s->capture = c;
    s->tail.clear();
    rt.captures.push_back(c);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
    Runtime& rt = enter("cudaStreamEndCapture");
    require_stream("cudaStreamEndCapture", s);
    Guard guard(rt.lock);
    Capture* c = s->capture;
    *graph = nullptr;
    if (!c) { return fail(cudaErrorIllegalState); }
    if (c->origin != s) { return fail(fail_capture(c, cudaErrorStreamCaptureUnmatched)); }
    if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self())) {
        return fail(fail_capture(c, cudaErrorStreamCaptureWrongThread));
    }
    cudaError_t e = c->failed ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (CUstream_st* other : c->streams) {
        if (e == cudaSuccess && !covered(*c->nodes, other->tail, s->tail)) {
            e = cudaErrorStreamCaptureUnjoined;
        }
        c->nodes->lanes.push_back(other->name + " in a graph");
    }
    for (CUstream_st* other : c->streams) {
        other->capture = nullptr;
    }
    if (e == cudaSuccess) {
        *graph = new CUgraph_st();
        (*graph)->nodes = c->nodes;
    }
    rt.captures.erase(std::find(rt.captures.begin(), rt.captures.end(), c));
    delete c;
    return fail(e);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
    require_stream("cudaStreamIsCapturing", s);
    Guard guard(runtime().lock);
    *status = !s->capture          ? cudaStreamCaptureStatusNone
              : s->capture->failed ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                     const cudaGraphEdgeData** edges, size_t* nnodes) {
    if (graph || nodes || edges || nnodes) { return fail(cudaErrorNotSupported); }
    cudaError_t e = cudaStreamIsCapturing(s, status);
    Guard guard(runtime().lock);
    if (id && s->capture) { *id = s->capture->id; }
    return e;
}
#endif

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
    enter("cudaGraphInstantiate");
    // the operations hold the state of their run: there can be one run at a time
    if (flags != 0 || graph->nodes->instantiated) { return fail(cudaErrorNotSupported); }
    graph->nodes->instantiated = true;
    *exec = new CUgraphExec_st();
    (*exec)->nodes = graph->nodes;
    for (const std::string& name : graph->nodes->lanes) {
        (*exec)->lanes.push_back(create_stream(current_device(), 0, name));
    }
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
    Runtime& rt = enter("cudaGraphLaunch");
    require_stream("cudaGraphLaunch", s);
    Guard guard(rt.lock);
    if (s->capture) { return fail(refuse_in_capture_of(s)); } // graphs in graphs
    count(COUNT_LAUNCH);
    // all of it comes after what is on the stream, and after the last launch
    std::shared_ptr<Record> begin = push_record(s);
    for (CUstream_st* lane : exec->lanes) {
        push_wait(lane, begin);
        for (auto& end : exec->last) {
            push_wait(lane, end);
        }
    }
    const std::vector<Node>& nodes = exec->nodes->nodes;
    std::vector<bool> awaited(nodes.size(), false); // from another lane
    for (const Node& n : nodes) {
        for (int before : n.after) {
            if (nodes[(size_t)before].lane != n.lane) { awaited[(size_t)before] = true; }
        }
    }
    std::vector<std::shared_ptr<Record>> ends(nodes.size());
    for (size_t i = 0; i < nodes.size(); i++) {
        CUstream_st* lane = exec->lanes[(size_t)nodes[i].lane];
        for (int before : nodes[i].after) {
            if (nodes[(size_t)before].lane != nodes[i].lane) { push_wait(lane, ends[(size_t)before]); }
        }
        push_node(lane, nodes[i]);
        if (awaited[i]) { ends[i] = push_record(lane); }
    }
    exec->last.clear();
    for (CUstream_st* lane : exec->lanes) {
        exec->last.push_back(push_record(lane));
        push_wait(s, exec->last.back());
    }
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    enter("cudaGraphDestroy");
    delete graph;
    return cudaSuccess;
}

// waits for a launch that runs
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    enter("cudaGraphExecDestroy");
    for (CUstream_st* lane : exec->lanes) {
        destroy_stream(lane);
    }
    delete exec;
    return cudaSuccess;
}
}
