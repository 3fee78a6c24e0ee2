# The commands people type; the work is done by scripts/setup, scripts/install and cargo xtask.
# Variables: KEEP=1 leaves the demo's daemon running; POOL=local or rados is the demo's pool; ONLY=, SKIP= choose test
# stages, BUDGET= limits the minutes that they take.  scripts/install says what PREFIX=, DESTDIR= and others mean to `make
# install`; PROGRAM= is a program that is built already.

# The program that is shipped; built by `make dist` unless another is named.
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
PROGRAM ?= $(TARGET_DIR)/dist/forebay
PLACES := PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' SYSCONFDIR='$(SYSCONFDIR)' UNITDIR='$(UNITDIR)' ZSHDIR='$(ZSHDIR)'

.PHONY: help dist install uninstall demo test soak check bench

help:
	@echo 'make demo    from nothing to a served volume with real data in it (KEEP=1: stays up)'
	@echo 'make test    every test; what needs a guest machine sets it up by itself (ONLY=a,b  SKIP=a,b  BUDGET=minutes)'
	@echo 'make soak    the long tests at full length: seeds, kills, seconds'
	@echo 'make check   formatting, lints, documentation, layering'
	@echo 'make install the program, its unit, manual and completions (PREFIX=/usr/local  DESTDIR=); make uninstall'
	@echo 'make bench   side by side with qemu-nbd, tgt, librbd, ISA-L and others; writes docs/benchmarks'
	@echo 'More: cargo xtask help'

dist:
	@scripts/setup build
	@cargo build --profile dist -p forebay

# As root after `make dist` as another user, nothing is built: root may have no compiler.
install: $(if $(filter $(TARGET_DIR)/dist/forebay,$(PROGRAM)),$(if $(wildcard $(PROGRAM)),$(if $(shell command -v cargo),dist),dist))
	@$(PLACES) PROGRAM='$(PROGRAM)' scripts/install

uninstall:
	@$(PLACES) scripts/install --remove

demo:
	@scripts/setup build demo $(if $(filter rados,$(POOL)),cluster)
	@cargo xtask demo $(if $(KEEP),--keep) $(if $(POOL),--pool $(POOL))

test:
	@since=$$(date +%s) && scripts/setup build test && \
	  cargo xtask test $(if $(BUDGET),--budget $(BUDGET) --since $$since) $(if $(ONLY),--only $(ONLY)) $(if $(SKIP),--skip $(SKIP))

soak:
	@scripts/setup build test
	@cargo xtask soak $(if $(ONLY),--only $(ONLY)) $(if $(SKIP),--skip $(SKIP))

check:
	@scripts/setup build
	@cargo xtask check

bench:
	@scripts/setup build bench
	@cargo xtask bench nbd
	@cargo xtask bench iscsi
	@cargo xtask bench nvmf
	@cargo xtask bench vhost
	@cargo xtask bench store
	@cargo xtask bench rados
	@cargo xtask bench gateway
	@cargo xtask bench messenger
	@cargo xtask bench ec
	@cargo xtask bench crc32c
	@cargo xtask bench compress
	@cargo xtask bench xts
