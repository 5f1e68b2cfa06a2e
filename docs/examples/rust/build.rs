//! Where libpreflash.so is: PREFLASH_LIB_DIR, as `python -m preflash config --libdir` says it.

fn main() {
    println!("cargo:rerun-if-env-changed=PREFLASH_LIB_DIR");
    if let Ok(dir) = std::env::var("PREFLASH_LIB_DIR") {
        println!("cargo:rustc-link-search={dir}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
