//! Every situation of a machine, by what its libraries answer.

use super::*;

fn answers(init: i32, version: i32, devices: i32) -> DriverAnswers {
    DriverAnswers {
        file: Some("/usr/lib/x86_64-linux-gnu/libcuda.so.580.1".to_owned()),
        init,
        init_name: "CUDA_TEST".to_owned(),
        version: Some(version),
        devices: Some(devices),
    }
}

fn decide(answers: &DriverAnswers, visible: Option<&str>) -> DriverDecision {
    decide_driver(answers, &Reach::Same, &VisibleDevices::parse(visible))
}

fn attempt(component: Component, outcome: Outcome) -> Attempt {
    Attempt {
        component,
        origin: Origin::DynamicLinker,
        path: "libx.so".to_owned(),
        file: None,
        outcome,
    }
}

fn used(major: u32, minor: u32) -> Outcome {
    Outcome::Used {
        version: Some(Version::new(major, minor)),
    }
}

#[test]
fn a_driver_with_gpus_is_ready() {
    let cuda = Version::new(13, 0);
    assert_eq!(
        decide(&answers(0, 13000, 2), None),
        DriverDecision::Ready { cuda, devices: 2 }
    );
}

#[test]
fn a_driver_that_sees_no_gpu_says_so() {
    assert_eq!(decide(&answers(100, 13000, 0), None), DriverDecision::NoDevice);
    assert_eq!(decide(&answers(0, 13000, 0), None), DriverDecision::NoDevice);
}

#[test]
fn a_stub_is_known_by_its_code_its_version_or_its_folder() {
    let is_stub = |answers: &DriverAnswers| matches!(decide(answers, None), DriverDecision::Stub { .. });
    assert!(is_stub(&answers(34, 13000, 0)));
    assert!(is_stub(&answers(100, 0, 0)));
    let mut in_stubs = answers(0, 13000, 1);
    in_stubs.file = Some("/usr/local/cuda/lib64/stubs/libcuda.so".to_owned());
    assert!(is_stub(&in_stubs));
    let mut silent = answers(0, 0, 1);
    silent.version = None;
    assert!(is_stub(&silent));
}

#[test]
fn an_empty_list_of_visible_devices_is_the_reason_for_none() {
    assert_eq!(decide(&answers(100, 13000, 0), Some("")), DriverDecision::DevicesHidden);
}

#[test]
fn a_bad_entry_of_the_visible_devices_is_named() {
    let invalid = |entry: &str| DriverDecision::DevicesInvalid {
        entry: entry.to_owned(),
    };
    assert_eq!(decide(&answers(100, 13000, 0), Some("gpu0")), invalid("gpu0"));
    assert_eq!(decide(&answers(100, 13000, 0), Some("-1")), invalid("-1"));
    assert_eq!(decide(&answers(0, 13000, 0), Some("7")), invalid("7"));
    let mig = "MIG-41b02f5d";
    assert_eq!(decide(&answers(100, 13000, 0), Some(mig)), invalid(mig));
}

#[test]
fn visible_devices_that_leave_a_gpu_are_no_reason_to_refuse() {
    let decision = decide(&answers(0, 13000, 1), Some("0,nonsense"));
    assert!(matches!(decision, DriverDecision::Ready { devices: 1, .. }));
}

#[test]
fn a_driver_of_cuda_11_is_too_old() {
    let cuda = Version::new(11, 8);
    assert_eq!(decide(&answers(0, 11080, 1), None), DriverDecision::TooOld { cuda });
}

#[test]
fn a_driver_that_does_not_start_is_named_with_its_code() {
    let decision = decide(&answers(803, 13000, 0), None);
    assert!(matches!(decision, DriverDecision::InitFailed { code: 803, .. }));
}

#[test]
fn another_library_that_the_bindings_would_take_is_a_reason_to_refuse() {
    let all = VisibleDevices::All;
    let other = Reach::Other {
        file: "/x/stubs/libcuda.so".to_owned(),
    };
    let hidden = decide_driver(&answers(0, 13000, 1), &other, &all);
    assert!(matches!(hidden, DriverDecision::Hidden { .. }));
    let unreachable = decide_driver(&answers(0, 13000, 1), &Reach::Nothing, &all);
    assert!(matches!(unreachable, DriverDecision::Unreachable { .. }));
}

#[test]
fn ptx_needs_a_driver_of_its_version_and_machine_code_one_of_its_major_version() {
    let rule = |driver: (u32, u32), toolkit: (u32, u32)| {
        image_rule(Version::new(driver.0, driver.1), Version::new(toolkit.0, toolkit.1))
    };
    assert_eq!(rule((13, 0), (13, 0)), ImageRule::CubinAndPtx);
    assert_eq!(rule((13, 0), (12, 9)), ImageRule::CubinAndPtx);
    assert_eq!(rule((13, 0), (13, 2)), ImageRule::CubinOnly);
    assert_eq!(rule((12, 4), (12, 9)), ImageRule::CubinOnly);
    assert_eq!(rule((12, 9), (13, 0)), ImageRule::Neither);
}

#[test]
fn a_patch_of_a_library_does_not_make_it_too_new() {
    let library = Version::of_library(130_100);
    assert!(fits(Some(Version::new(13, 0)), library));
    assert!(!fits(Some(Version::new(12, 9)), library));
    assert!(fits(None, library));
}

#[test]
fn the_compiler_needs_its_builtins() {
    let found = attempt(Component::Nvrtc, used(13, 0));
    let version = Version::new(13, 0);
    assert_eq!(
        decide_nvrtc(std::slice::from_ref(&found)),
        LibraryDecision::BuiltinsMissing { version }
    );
    let both = [found, attempt(Component::NvrtcBuiltins, used(13, 0))];
    assert_eq!(decide_nvrtc(&both), LibraryDecision::Ready { version });
}

#[test]
fn no_toolkit_is_not_found() {
    let attempts = [attempt(Component::Nvrtc, Outcome::NotThere)];
    assert_eq!(decide_nvrtc(&attempts), LibraryDecision::NotFound);
    assert_eq!(decide_nvrtc(&[]), LibraryDecision::NotFound);
}

#[test]
fn a_toolkit_that_is_too_new_names_the_driver_that_it_needs() {
    let version = Version::new(13, 0);
    let attempts = [
        attempt(Component::Nvrtc, Outcome::TooNewForDriver { version }),
        attempt(Component::Nvrtc, Outcome::NotLoadable { reason: "x".to_owned() }),
    ];
    let driver_release_min = 580;
    let expected = LibraryDecision::DriverTooOld {
        version,
        driver_release_min,
    };
    assert_eq!(decide_nvrtc(&attempts), expected);
}

#[test]
fn an_older_toolkit_that_fits_the_driver_is_used() {
    let version = Version::new(13, 0);
    let attempts = [
        attempt(Component::CublasLt, Outcome::TooNewForDriver { version }),
        attempt(Component::CublasLt, used(12, 9)),
    ];
    let version = Version::new(12, 9);
    assert_eq!(
        decide_library(&attempts, Component::CublasLt),
        LibraryDecision::Ready { version }
    );
}

#[test]
fn nccl_is_missing_or_of_a_time_without_the_functions_that_are_called() {
    assert_eq!(decide_library(&[], Component::Nccl), LibraryDecision::NotFound);
    let symbol = "ncclCommInitRankConfig";
    let old = [attempt(Component::Nccl, Outcome::SymbolMissing { symbol })];
    let LibraryDecision::Unusable { why } = decide_library(&old, Component::Nccl) else {
        panic!("it cannot be used");
    };
    assert!(why.contains(symbol));
}
