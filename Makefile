# make [DEVICE=cpu|cuda|emu] [PRECISION=BF16|FP32] [MPI=0|1] [SAN=asan|tsan|check] [DEBUG=1] TARGET   (make help: the targets)
SHELL     := /bin/bash
comma     := ,
DEVICE    ?= cpu
PRECISION ?= BF16
MPICC     ?= mpicc
ARCH      ?= native
SAN       ?=
DEBUG     ?= 0
# detected: is there an MPI to link with, and, for cuda and emu, where CUDA's parts are
MPI       ?= $(if $(shell command -v $(MPICC)),1,0)

one_of = $(if $(filter $($(1)),$(2)),,$(error $(1)=$($(1)): want one of $(2)))
$(call one_of,DEVICE,cpu cuda emu)
$(call one_of,PRECISION,BF16 FP32)
$(call one_of,MPI,0 1)
$(if $(SAN),$(call one_of,SAN,$(if $(filter emu,$(DEVICE)),asan check,$(if $(filter cpu,$(DEVICE)),asan tsan fuzz))))

# every configuration builds in a folder of its own: objects never mix, so nothing ever needs a clean
folder = build/$(1)-$(PRECISION)$(if $(filter 1,$(MPI)),-mpi)$(SAN:%=-%)$(if $(filter 1,$(DEBUG)),-debug)
B := $(call folder,$(DEVICE))

NO_MPI  := $(if $(filter 0,$(MPI)),%_mpi.c)
NO_CUDA := $(if $(filter cpu,$(DEVICE)),%/test_attention_calls.c)
# the emulated NCCL is MPI
NO_TCP  := $(if $(filter cpu,$(DEVICE)),,%/test_comm_tcp.c)
NO_EMU  := $(if $(filter emu,$(DEVICE)),,%/test_step.cu)
NEUTRAL := $(filter-out $(NO_MPI),$(wildcard flashoverlap/*.c train/*.c data/*.c))
DEVICES := $(if $(filter cpu,$(DEVICE)),$(wildcard flashoverlap/cpu/*.c),$(wildcard flashoverlap/cuda/*.cu))
EMU     := $(if $(filter emu,$(DEVICE)),$(filter-out $(if $(filter check,$(SAN)),,%/check.cpp %/check_host.cpp),$(wildcard dev/emu/*.cpp)))
LIB     := $(patsubst %,$(B)/%.o,$(NEUTRAL) $(filter-out $(NO_MPI),$(DEVICES)))
WHOLE   := $(EMU:%=$(B)/%.o) # linked as they are: the emulator's parts find each other without asking
TESTS   := $(patsubst %.c,$(B)/%,$(filter-out $(NO_MPI) $(NO_CUDA) $(NO_TCP),$(wildcard dev/test/test_*.c))) \
           $(patsubst %.cu,$(B)/%,$(filter-out $(NO_EMU),$(wildcard test_*.cu dev/test/test_*.cu $(if $(filter emu,$(DEVICE)),dev/emu/test/test_*.cu))))
SCRIPTS := $(filter-out dev/test/run.sh dev/test/program.py dev/test/cuda_test.py,$(wildcard dev/test/*.sh dev/test/*.py))
# all but one look into the cpu device, or want its emulated speeds
BENCHES := $(patsubst %.c,$(B)/%,$(if $(filter cpu,$(DEVICE)),predict_layer.c $(wildcard dev/bench/bench_*.c),dev/bench/bench_kernels.c))

ifeq ($(MPI),1)
MPIFLAGS := $(filter-out -pthread,$(shell $(MPICC) --showme:compile))
MPILIBS  := $(filter-out -pthread,$(shell $(MPICC) --showme:link))
endif
ifneq ($(DEVICE),cpu)
CUDA_MK := $(shell mkdir -p build && bash scripts/cuda_paths.sh >build/cuda-paths.mk && echo build/cuda-paths.mk)
include $(CUDA_MK)
$(if $(filter 0,$(CUDA_RUNTIME)),$(error DEVICE=$(DEVICE): no $(CUDA_RUNTIME_MISSING): install the CUDA toolkit and set CUDA_HOME, or the wheels (scripts/deps.sh --cuda)))
$(if $(filter cuda,$(DEVICE)),$(if $(NVCC),,$(error DEVICE=cuda: no nvcc: install the CUDA toolkit and set CUDA_HOME, or the wheels (scripts/deps.sh --cuda))))
$(if $(filter 0,$(CUDA_BLAS)),$(error DEVICE=$(DEVICE): no $(CUDA_BLAS_MISSING): install cuBLAS with the CUDA toolkit, or its wheel (scripts/deps.sh --cuda)))
endif
ifeq ($(DEVICE),emu)
FO_CUDNN := 0
endif
ifeq ($(DEVICE),cuda)
$(if $(filter 0,$(FO_CUDNN)),$(info DEVICE=cuda: no $(FO_CUDNN_MISSING): attention is by own kernels alone))
$(if $(filter 0,$(FO_NCCL)),$(info DEVICE=cuda: no nccl.h: ranks are threads of one process alone))
endif
# the checker of the emulator stands in for the run-time of clang's instrumentation
ifneq ($(filter check fuzz,$(SAN)),)
CC := clang
CXX := clang++
endif
# TSan can see into neither oneDNN nor OpenMP, so that build has plain loops; ASan's has oneDNN; fuzzing needs none
DNN      := $(if $(filter cpu,$(DEVICE)),$(if $(filter tsan fuzz,$(SAN)),0,1),0)
OMP      := $(if $(filter cpu,$(DEVICE)),$(if $(SAN),0,1),0)
# what is checked: its flags, and its calls that the checker stands in for
CHECK    := $(if $(filter check,$(SAN)),@dev/emu/check.flags)
CHECKED  := $(if $(filter check,$(SAN)),dev/emu/check.flags dev/emu/check.syms)
RENAME   := $(if $(filter check,$(SAN)),objcopy --redefine-syms=dev/emu/check.syms,true)
SANFLAGS := $(if $(filter asan,$(SAN)),-fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer) \
            $(if $(filter tsan,$(SAN)),-fsanitize=thread) \
            $(if $(filter fuzz,$(SAN)),-fsanitize=fuzzer-no-link$(comma)address$(comma)undefined -fno-sanitize-recover=undefined -Wno-unknown-pragmas -Wno-unknown-attributes)
OPT      := $(if $(filter 1,$(DEBUG)),-O0,-O3) $(if $(ARCH),-march=$(ARCH))
# what is compiled for a GPU: its machine code for these, and PTX of the last for what comes after
SMS      ?= 80 90 100
GENCODE  := $(foreach sm,$(SMS),-gencode arch=compute_$(sm)$(comma)code=sm_$(sm)) \
            -gencode arch=compute_$(lastword $(SMS))$(comma)code=compute_$(lastword $(SMS))
# ours first, so that what the caller adds (make CFLAGS=-g3) wins
override CPPFLAGS := -I. -D_GNU_SOURCE -DFO_PRECISION_$(PRECISION) -DFO_MPI=$(MPI) -DFO_ONEDNN=$(DNN) -DFO_OPENMP=$(OMP) \
                     -DFO_DEVICE_CPU=$(if $(filter cpu,$(DEVICE)),1,0) -MMD -MP $(MPIFLAGS) $(CPPFLAGS)
CUDA_CPPFLAGS := $(if $(filter emu,$(DEVICE)),-DFO_EMU=1 -Idev/emu/include) -DFO_CUDNN=$(FO_CUDNN) -DFO_NCCL=$(FO_NCCL) $(CUDA_FLAGS)
CXXFLAGS_EMU  := -std=c++17 $(OPT) -g -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas -pthread $(SANFLAGS)
NVCCFLAGS     := -std=c++17 -O3 -lineinfo $(GENCODE) -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-Wno-unused-parameter,-pthread
override CFLAGS   := -std=c11 $(OPT) -g -Wall -Wextra -Werror -pthread $(SANFLAGS) $(if $(filter 1,$(OMP)),-fopenmp) $(CFLAGS)
LIBS := $(if $(filter 1,$(DNN)),-ldnnl) $(if $(filter cuda,$(DEVICE)),$(CUDA_LIBS)) $(MPILIBS) $(if $(filter cpu,$(DEVICE)),,-ldl) -lm
# a program is linked by the compiler of its device's language
LINKER := $(if $(filter cpu,$(DEVICE)),$(CC) $(CFLAGS),$(CXX) -pthread $(SANFLAGS) -rdynamic)

# builds use all cores, unless told by -j; tests are one recipe, in which run.sh decides
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

all: train_gpt ## build ./train_gpt (the default)
train_gpt: $(B)/train_gpt
	@ln -sfn $< $@
tests: $(TESTS) $(B)/train_gpt
benches: $(BENCHES)

ifeq ($(DEVICE),cuda)
$(B)/flashoverlap/cuda/%.cu.o: flashoverlap/cuda/%.cu Makefile
	@mkdir -p $(@D)
	@echo 'NVCC $<'
	@$(NVCC) $(CPPFLAGS) $(CUDA_CPPFLAGS) $(NVCCFLAGS) -c $< -o $@
endif
ifeq ($(DEVICE),emu)
$(B)/flashoverlap/cuda/%.cu.o: flashoverlap/cuda/%.cu Makefile $(CHECKED)
	@mkdir -p $(@D)
	@echo 'CXX  $<'
	@$(CXX) -x c++ $(CPPFLAGS) $(CUDA_CPPFLAGS) $(CXXFLAGS_EMU) $(CHECK) -c $< -o $@ && $(RENAME) $@
$(B)/dev/emu/test/%.cu.o: dev/emu/test/%.cu Makefile $(CHECKED)
	@mkdir -p $(@D)
	@echo 'CXX  $<'
	@$(CXX) -x c++ $(CPPFLAGS) $(CUDA_CPPFLAGS) $(CXXFLAGS_EMU) $(CHECK) -c $< -o $@ && $(RENAME) $@
$(B)/dev/emu/test/%.cu.o: dev/emu/test/%.cu Makefile
	@mkdir -p $(@D)
	@echo 'CXX  $<'
	@$(CXX) -x c++ $(CPPFLAGS) $(CUDA_CPPFLAGS) $(CXXFLAGS_EMU) $(CHECK) -c $< -o $@ && $(RENAME) $@
# the emulator itself is never instrumented
$(B)/dev/emu/%.cpp.o: dev/emu/%.cpp Makefile
	@mkdir -p $(@D)
	@echo 'CXX  $<'
	@$(CXX) $(CPPFLAGS) $(CUDA_CPPFLAGS) $(CXXFLAGS_EMU) -c $< -o $@
endif
# .cu files outside flashoverlap/cuda/ are written in the C that is also C++
$(B)/%.cu.o: %.cu Makefile $(CHECKED)
	@mkdir -p $(@D)
	@echo 'CC   $<'
	@$(CC) -x c $(CPPFLAGS) $(CFLAGS) $(CHECK) -Wc++-compat -c $< -o $@ && $(RENAME) $@
$(B)/%.c.o: %.c Makefile $(CHECKED)
	@mkdir -p $(@D)
	@echo 'CC   $<'
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(CHECK) -c $< -o $@ && $(RENAME) $@
# an archive, so that a program takes what it uses: train/generate.c wants train_gpt.cu's forward pass
$(B)/lib.a: $(LIB)
	@rm -f $@ && ar rcs $@ $^
# --plan: all that is neutral once more, with a simulated device and more ranks. One object, of which run_plan alone is
# seen from outside; it calls nothing of the real device
SIM := $(patsubst %,$(B)/sim/%.o,$(filter-out %/fo.c %/fo_comm.c %/fo_threads.c %/fo_sockets.c %/fo_rendezvous.c %_mpi.c,$(NEUTRAL)) $(wildcard flashoverlap/sim/*.c) dev/sim/predict.c)
$(B)/sim/%.c.o: %.c Makefile
	@mkdir -p $(@D)
	@echo 'CC   $< (simulated)'
	@$(CC) -DFO_MAX_RANKS=1024 $(CPPFLAGS) $(CFLAGS) -Wno-unused-function -c $< -o $@
$(B)/sim.o: $(SIM)
	@$(LD) -r -o $@ $^
	@if nm -u $@ | grep -E ' fo_' | grep -vE ' fo_(die|quit)'; then echo 'not defined by the simulated device'; rm $@; false; fi
	@objcopy --keep-global-symbol=run_plan $@
$(B)/train_gpt: $(B)/sim.o
# what benches share
SHARED := dev/bench/bench.c dev/bench/layer.c
$(B)/dev/bench/bench_overlap: $(SHARED:%=$(B)/%.o)
$(B)/dev/bench/bench_mesh $(B)/dev/bench/bench_link: $(B)/dev/bench/bench.c.o
# the bench's layers on the simulated device: the same object with another main
$(B)/sim_layer.o: $(filter $(B)/sim/flashoverlap/%,$(SIM)) $(SHARED:%=$(B)/sim/%.o) $(B)/sim/dev/sim/predict_layer.c.o
	@$(LD) -r -o $@ $^
	@objcopy --keep-global-symbol=main $@
$(B)/predict_layer: $(B)/sim_layer.o $(B)/lib.a
	@echo 'LINK $@'
	@$(LINKER) $^ $(LIBS) $(LDLIBS) -o $@
# a library behind what needs it
LINKED = $(filter-out %.a,$^) $(filter %.a,$^)
$(B)/%: $(B)/%.cu.o $(WHOLE) $(B)/lib.a
	@echo 'LINK $@'
	@$(LINKER) $(LINKED) $(LIBS) $(LDLIBS) -o $@
$(B)/%: $(B)/%.c.o $(WHOLE) $(B)/lib.a
	@echo 'LINK $@'
	@$(LINKER) $(LINKED) $(LIBS) $(LDLIBS) -o $@

# they include train_gpt.cu and use parts of it
INCLUDERS := test_gpt.cu dev/test/test_generate.cu dev/test/test_step.cu dev/bench/bench_step.c dev/bench/bench_mesh.c
$(INCLUDERS:%=$(B)/%.o): override CFLAGS += -Wno-unused-function

# a sub-make, so that what deps has just installed is seen
SUB = $(MAKE) --no-print-directory
deps: ## install what is missing (apt); quick when nothing is
	@bash scripts/deps.sh
quickstart: deps ## train a small GPT on real text with 4 ranks, then compare none, slice and flash
	+@$(SUB) train_gpt && bash scripts/quickstart.sh
test: deps ## all tests, in BF16 and FP32 builds
	+@$(SUB) run-tests && $(SUB) PRECISION=FP32 run-tests-fp32
run-tests: tests benches
	@B=$(B) bash dev/test/run.sh $(TESTS) $(SCRIPTS)
run-tests-fp32: tests
	@B=$(B) bash dev/test/run.sh $(filter-out %_mpi,$(TESTS)) dev/test/llmc_test.py
asan: ## the tests under AddressSanitizer and UBSan
	+@$(SUB) SAN=asan run-san
tsan: ## the tests under ThreadSanitizer: a missing wait is a reported race
	+@TSAN_OPTIONS=halt_on_error=1 $(SUB) SAN=tsan MPI=0 run-san
FUZZ_TIME ?= 30
fuzz: ## fuzz each reader of files for FUZZ_TIME seconds (clang's libFuzzer); TARGETS="shard model": those alone
	+@$(SUB) SAN=fuzz MPI=0 run-fuzz
$(B)/dev/fuzz/fuzz: LIBS += -fsanitize=fuzzer
run-fuzz: $(B)/dev/fuzz/fuzz
	@FUZZ_TIME=$(FUZZ_TIME) TARGETS="$(TARGETS)" bash dev/fuzz/fuzz.sh $<
run-san: tests
	@JOBS=2 LIMIT=900 B=$(B) bash dev/test/run.sh $(TESTS)
deps-cuda:
	@bash scripts/deps.sh --cuda
# emulation: what has no streams once; all else in each schedule; then under the checker
SCHEDULES ?= eager lazy random:1 random:2 random:3
ANYWHERE  := $(patsubst %,$(B)/dev/test/test_%,plan model options data train checkpoint)
emu: deps-cuda ## all tests of the cuda device's sources on the CPU, in SCHEDULES; then under the checker
	+@$(SUB) DEVICE=emu run-emu && $(SUB) DEVICE=emu SAN=check MPI=0 run-emu-check
run-emu: tests
	@JOBS=2 B=$(B) bash dev/test/run.sh $(ANYWHERE) dev/test/cuda_test.py
	@for s in $(SCHEDULES); do \
	    echo "== schedule $$s"; export FO_EMU_SCHED=$$s B=$(B) NP="1 2 3" JOBS=2 LIMIT=900; \
	    bash dev/test/run.sh $(filter-out $(ANYWHERE),$(TESTS)) || exit 1; done
# a model trains under the checker on the three kinds of mesh; the rest of test_gpt would take an hour
CHECKED_TESTS ?= $(filter-out $(ANYWHERE) $(B)/test_gpt $(B)/dev/test/test_generate,$(TESTS)) \
                 "$(B)/test_gpt 1 1 2" "$(B)/test_gpt 2 1 1" "$(B)/test_gpt 1 2 1"
run-emu-check: tests
	@JOBS=2 LIMIT=900 B=$(B) bash dev/test/run.sh dev/emu/test/check_test.sh $(CHECKED_TESTS)
cuda: deps-cuda ## all that can be done for NVIDIA GPUs without one: build, api, ptxas, cuDNN's plans
	+@$(SUB) DEVICE=cuda train_gpt tests
	+@$(SUB) api && $(SUB) ptxas
	@B=$(call folder,cuda) bash dev/test/run.sh dev/test/cuda_test.py
	@bash dev/test/cudnn_plans/cudnn_plans.sh
api: deps-cuda ## do the devices cpu, cuda and emu define the same functions?
	+@for d in cuda emu cpu; do $(SUB) DEVICE=$$d train_gpt || exit 1; done
	@bash scripts/api.sh $(call folder,cpu) $(call folder,cuda) $(call folder,emu)
ptxas: deps-cuda ## registers, shared memory and spills of each kernel for sm_90; fails if one spills
	+@$(SUB) DEVICE=cuda run-ptxas
run-ptxas:
	@bash scripts/ptxas.sh '$(NVCC)' '$(CPPFLAGS) $(CUDA_CPPFLAGS)' $(wildcard flashoverlap/cuda/*.cu)
bench: deps ## a training step of GPT-2 124M on one rank: tok/s, MFU, the share of each operation
	+@$(SUB) benches && $(B)/dev/bench/bench_step
bench-peers: deps ## the same step beside PyTorch's (ARGS="--python PATH" of another one) and, with LLMC=FOLDER, llm.c's: the ratio
	+@$(SUB) train_gpt $(if $(LLMC),&& $(SUB) PRECISION=FP32 $(subst BF16,FP32,$(B))/train_gpt)
	@dev/bench/peers/peers.py --device $(DEVICE) --program $(B)/train_gpt \
	    $(if $(LLMC),--llmc '$(LLMC)' --program-fp32 $(subst BF16,FP32,$(B))/train_gpt) $(ARGS)
bench-overlap: deps ## exposed communication under none, slice and flash: of layers (ARGS="--ratio 0.74"), of steps (MESH_ARGS="tp4")
	+@$(SUB) benches
	@$(B)/dev/bench/bench_overlap $(ARGS); layers=$$?; $(B)/dev/bench/bench_mesh $(MESH_ARGS); steps=$$?; \
	    exit $$((layers > steps ? layers : steps))

SOURCES := $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' 2>/dev/null)
format: ## format the sources
	@bash scripts/format.sh $(SOURCES)
format-check: ## are they formatted?
	@bash scripts/format.sh --check $(SOURCES)
clean: ## remove what was built
	rm -rf build train_gpt
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

-include $(shell find build -name '*.d' 2>/dev/null)
.PHONY: all fuzz run-fuzz train_gpt tests benches deps quickstart test run-tests run-tests-fp32 asan tsan run-san bench bench-peers bench-overlap
.PHONY: format format-check clean help deps-cuda cuda api emu run-emu run-emu-check ptxas run-ptxas
.SECONDARY:
