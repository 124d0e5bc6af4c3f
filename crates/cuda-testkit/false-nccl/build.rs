//! Gives the library the SONAME of the real one.

#![forbid(unsafe_code)]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    // Threads run in the library, so it stays in the process when its handle is closed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
