//! The program that libFuzzer drives: one target, which `BATON_FUZZ_TARGET` names.

#![no_main]

use std::sync::OnceLock;

use fuzz::Target;

static TARGET: OnceLock<&Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        let name = std::env::var("BATON_FUZZ_TARGET").unwrap_or_default();
        let target = fuzz::open(&name).unwrap_or_else(|| panic!("BATON_FUZZ_TARGET={name:?} names no target"));
        TARGET.get_or_init(|| target);
    },
    |data: &[u8]| {
        TARGET.get().expect("init comes first").check(data);
    }
);
