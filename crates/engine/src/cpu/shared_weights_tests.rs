//! Threads stand for processes here: each opens the file for itself, as a process does, so that its lock is its own.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

fn id(byte: u8) -> WeightsId {
    WeightsId {
        content: [byte; 32],
        layout: [7; 32],
    }
}

const BYTES: usize = (4 << 20) + 12_345;

fn pattern(memory: &mut [u8]) {
    for (index, byte) in memory.iter_mut().enumerate() {
        *byte = (index % 251) as u8;
    }
}

fn is_pattern(memory: &[u8]) -> bool {
    let mut bytes = memory[..BYTES].iter().enumerate();
    bytes.all(|(index, byte)| *byte == (index % 251) as u8)
}

/// The inodes of all mappings of this kind of file in this process, with their protection.
fn mappings(inode: u64) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| {
        let inode_text = line.split_whitespace().nth(4);
        line.contains("baton-weights") && inode_text == Some(inode.to_string().as_str())
    });
    ours.map(|line| line.split_whitespace().nth(1).unwrap().to_owned())
        .collect()
}

fn inode(file: &WeightsFile) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    file.0.metadata().unwrap().ino()
}

#[test]
fn of_several_processes_one_packs_and_all_map_the_same_pages_read_only() {
    let file = WeightsFile::create().unwrap();
    let (path, packed) = (file.path(), AtomicU32::new(0));
    let all: Vec<FixedMemory> = std::thread::scope(|scope| {
        let user = || {
            SharedWeights::at(&path).take_or_fill(BYTES, &|| id(1), |memory| {
                packed.fetch_add(1, Ordering::SeqCst);
                pattern(memory);
            })
        };
        let users: Vec<_> = (0..4).map(|_| scope.spawn(user)).collect();
        users.into_iter().map(|user| user.join().unwrap().unwrap()).collect()
    });
    assert_eq!(packed.into_inner(), 1);
    assert!(all.iter().all(|memory| is_pattern(memory)));
    assert_eq!(mappings(inode(&file)), ["r--s"; 4]);
    let inode = inode(&file);
    drop(file);
    assert!(is_pattern(&all[3]), "the memory lives as long as its mappings");
    drop(all);
    assert!(mappings(inode).is_empty());
}

#[test]
fn when_the_packer_dies_in_the_middle_the_next_one_packs_again() {
    let file = WeightsFile::create().unwrap();
    let path = file.path();
    let died = std::panic::catch_unwind(|| {
        let shared = SharedWeights::at(&path);
        let _ = shared.take_or_fill(2 * BYTES, &|| id(1), |memory| {
            memory.fill(0xee);
            panic!("killed");
        });
    });
    assert!(died.is_err());
    let mut was_zero = false;
    let packed = SharedWeights::at(&file.path()).take_or_fill(BYTES, &|| id(1), |memory| {
        was_zero = memory.iter().all(|byte| *byte == 0);
        pattern(memory);
    });
    assert!(was_zero, "it finds nothing of what the dead one wrote");
    assert!(is_pattern(&packed.unwrap()));
}

const PATH_VARIABLE: &str = "BATON_TEST_WEIGHTS_PATH";

/// Not a test by itself: the process that the next test starts and kills.
#[test]
fn packs_for_ever_when_it_is_told_to() {
    let Some(path) = std::env::var_os(PATH_VARIABLE) else {
        return;
    };
    let _ = SharedWeights::at(Path::new(&path)).take_or_fill(BYTES, &|| id(1), |memory| {
        memory.fill(0xee);
        println!("filled");
        let _ = std::io::stdin().read_line(&mut String::new());
        panic!("nobody killed this process");
    });
}

#[test]
fn when_a_process_is_killed_while_it_packs_the_one_that_waits_packs_again() {
    use std::io::BufRead as _;
    let file = WeightsFile::create().unwrap();
    let this = std::thread::current().name().unwrap_or_default().to_owned();
    let own = this.rsplit_once("::").map_or("", |(module, _)| module);
    let mut packer = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--nocapture",
            &format!("{own}::packs_for_ever_when_it_is_told_to"),
        ])
        .env(PATH_VARIABLE, file.path())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = std::io::BufReader::new(packer.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap().ends_with("filled")));
    let path = file.path();
    let waiting = std::thread::spawn(move || SharedWeights::at(&path).take_or_fill(BYTES, &|| id(1), pattern));
    packer.kill().unwrap();
    packer.wait().unwrap();
    assert!(is_pattern(&waiting.join().unwrap().unwrap()));
}

#[test]
fn other_weights_are_refused() {
    let file = WeightsFile::create().unwrap();
    let shared = SharedWeights::at(&file.path());
    shared.take_or_fill(BYTES, &|| id(1), pattern).unwrap();
    let never = |_: &mut [u8]| panic!("it is packed already");
    for (bytes, wanted) in [
        (BYTES, id(2)),
        (BYTES - 80, id(1)),
        (BYTES + 80, id(1)),
        (9 * BYTES, id(1)),
    ] {
        let refused = shared.take_or_fill(bytes, &|| wanted, never);
        assert!(matches!(refused, Err(NotShared::OtherWeights)), "{bytes} {wanted:?}");
    }
    let layout = WeightsId {
        layout: [8; 32],
        ..id(1)
    };
    let refused = shared.take_or_fill(BYTES, &|| layout, never);
    assert!(matches!(refused, Err(NotShared::OtherWeights)));
    assert!(is_pattern(&shared.take_or_fill(BYTES, &|| id(1), never).unwrap()));
}

#[test]
fn nobody_can_change_packed_weights() {
    use std::io::Write as _;
    let file = WeightsFile::create().unwrap();
    let shared = SharedWeights::at(&file.path());
    let packed = shared.take_or_fill(BYTES, &|| id(1), pattern).unwrap();
    let mut writer = shared.open(true).unwrap();
    assert!(writer.write_all(b"x").is_err());
    assert!(writer.set_len(1).is_err());
    assert!(is_pattern(&packed));
}

#[test]
fn a_packer_that_stands_still_is_not_waited_for_without_end() {
    let file = WeightsFile::create().unwrap();
    let mut shared = SharedWeights::at(&file.path());
    let holder = shared.open(false).unwrap();
    holder.lock().unwrap();
    shared.wait = Duration::from_millis(20);
    let refused = shared.take_or_fill(BYTES, &|| id(1), pattern);
    assert!(matches!(refused, Err(NotShared::StillPacking)));
    drop(holder);
    assert!(shared.take_or_fill(BYTES, &|| id(1), pattern).is_ok());
}

#[test]
fn what_is_no_memory_of_up_is_no_reason_to_stop() {
    let shared = SharedWeights::at(Path::new("/proc/self/fd/no-such"));
    let refused = shared.take_or_fill(BYTES, &|| id(1), pattern);
    assert!(matches!(refused, Err(NotShared::System { .. })));
    let plain = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(plain.path(), "precious").unwrap();
    let refused = SharedWeights::at(plain.path()).take_or_fill(BYTES, &|| id(1), pattern);
    assert!(matches!(refused, Err(NotShared::NotMemory { .. })));
    assert_eq!(std::fs::read_to_string(plain.path()).unwrap(), "precious");
}
