//! Gives the library the SONAME of the real one: a program that has loaded it by its path finds it by its usual name.

#![forbid(unsafe_code)]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A thread runs in the library, so it stays in the process when its handle is closed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
