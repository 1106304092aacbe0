#![no_main]

extkv_core_fuzz::fuzz!("handshake");
