//! Room for connections and files, made before they come.
//!
//! Linux keeps the descriptors of a process in a table, and doubles it when it is full. If the process has several threads,
//! the thread that opens the 257th, the 513th or the 1,025th descriptor waits until no CPU reads the old table any more
//! (`expand_fdtable` in fs/file.c calls `synchronize_rcu`). This took 13 to 16 ms here (docs/measurements/client.md). An event
//! loop on that thread reads and sends nothing meanwhile.

/// A process that serves: so many connections come without a wait. The kernel's table takes 32 KiB.
pub const OF_A_SERVER: u32 = 4096;
/// The kernel's table takes 512 KiB. One address has no more ports.
const MAX: u32 = 1 << 16;

/// Makes room for `count` descriptors, at most 65,536 and at most what the process may have. Costs nothing in a process with
/// one thread. If the kernel refuses, the table grows later, as it would without this call.
pub fn make_room(count: u32) {
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let allowed = allowed.map_or(MAX, |limit| u32::try_from(limit).unwrap_or(MAX));
    let highest = count.min(MAX).min(allowed).saturating_sub(1);
    let Ok(highest) = i32::try_from(highest) else {
        return;
    };
    // The table grows when a descriptor with a high number is opened, and never shrinks.
    drop(rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), highest));
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    /// The size of the table; see proc_pid_status(5).
    fn table_size() -> u32 {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
        size.expect("a size").trim().parse().expect("a number")
    }

    #[test]
    fn the_table_has_room_and_no_descriptor_stays_open() {
        let open = || std::fs::read_dir("/proc/self/fd").expect("Linux has it").count();
        let before = open();
        super::make_room(700);
        assert!(table_size() >= 700, "{}", table_size());
        assert_eq!(open(), before);
        // More than a process may have is no error.
        super::make_room(u32::MAX);
    }
}
